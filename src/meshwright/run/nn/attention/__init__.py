"""Attention modules: grouped-query self-attention and multi-head latent attention."""
