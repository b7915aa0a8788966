"""The `mw simulate rl` command: predicted reinforcement learning steps."""
