"""Writes timelines as Chrome trace-event JSON for the Perfetto UI."""
