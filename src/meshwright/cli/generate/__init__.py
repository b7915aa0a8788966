"""The `mw generate` command: offline batch generation from prompts, files or random tokens."""
