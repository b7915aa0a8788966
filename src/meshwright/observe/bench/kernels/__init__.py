"""Kernel benchmarks: GEMM, attention, memory-bound kernels, copies and launch overhead.

Modules build benchmark cases with input sizes and traffic estimates; `layer_kernels` and
`step_kernels` list the memory-bound ones.
"""
