"""Fused optimizer kernels: multi-tensor updates, gradient norm, 8-bit moments and rounding.

`fused_update` launches one kernel for all parameters; `update_reference` is its torch equivalent.
"""
