"""Gated activation kernels (GLU), alone and fused with the following linear layer."""
