"""The `mw diff` command: compares two profiles, or a prediction with a measurement."""
