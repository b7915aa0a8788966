"""The `mw plan rl` command: GPU allocation between rollout engines and the RL trainer."""
