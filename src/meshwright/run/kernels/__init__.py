"""Triton kernels, one folder each: the kernel, what feeds it, the same with plain torch."""

__all__: list[str] = []
