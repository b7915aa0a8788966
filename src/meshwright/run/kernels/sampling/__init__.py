"""Sampling kernels: penalties, token bitmasks, top-k, top-p and Gumbel argmax.

`row_params` holds the per-row parameters that the kernels read.
"""
