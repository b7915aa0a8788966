"""The `mw bench` command: device and machine benchmarks compared with catalog values."""
