"""RMSNorm kernels for GPU and CPU, with fused residual addition."""
