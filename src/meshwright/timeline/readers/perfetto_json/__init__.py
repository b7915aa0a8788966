"""Reads traces written by `write_perfetto` or `mw analyze --perfetto` into ranks."""
