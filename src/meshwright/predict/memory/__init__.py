"""Memory prediction per pipeline rank: model states, activations, buffers and runtime."""
