"""The `mw whatif` command: predicts the effect on a training step of changing one parameter."""
