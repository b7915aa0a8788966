"""The `mw evaluate` command: scores a language model or reward model on held-out data."""
