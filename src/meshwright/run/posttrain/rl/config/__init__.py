"""Configuration of RL runs: `RLConfig`, objectives, presets and compatibility checks."""
