"""Rotary position embedding kernels, alone and fused with QK normalization."""
