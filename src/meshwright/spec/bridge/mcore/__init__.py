"""Megatron-Core's own settings, which Megatron-LM's flags and NeMo's recipes both spell."""
