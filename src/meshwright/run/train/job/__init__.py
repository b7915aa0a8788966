"""Training jobs: `TrainJob`, TOML job files, overrides and validation."""
