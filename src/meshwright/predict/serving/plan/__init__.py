"""Serving plans: the search for the fewest GPUs that meet a latency target, and engine commands."""
