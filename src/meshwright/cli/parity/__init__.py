"""The `mw parity` command: compares parallel layouts numerically with a single device."""
