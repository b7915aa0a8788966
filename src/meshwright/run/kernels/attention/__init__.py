"""Attention kernels behind one function: cuDNN, flash and flex backends, and their selection.

`sdpa` is the entry point, and `selector` picks the backend for a shape.
"""
