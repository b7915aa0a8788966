"""Measures of a fleet as pure functions over columns: windows, levels, distributions, peers."""
