"""Kernels, one module each: what it computes and its floor, its gradient, the same in plain torch.

Import from the modules (`rms_norm`, `attention`, …): most are called like the function they hold.
A kernel that is too long for one module has `…_kernel` or `…_triton` beside it. `language` says
whether Triton or torch runs; `collective` moves chunks between ranks on one GPU.
"""

__all__: list[str] = []
