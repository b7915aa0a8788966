"""The `mw simulate` commands: predicted training steps, serving runs and RL steps."""
