"""Mixture-of-experts kernels: token permutation, grouped GEMM and fused down projection."""
