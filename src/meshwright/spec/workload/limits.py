"""The largest numbers of a workload: beyond any run, and small enough for exact sums."""

LONGEST = 10**9
"""Most tokens of one document, sequence, prompt or answer."""
MOST_IN_FLIGHT = 10**6
"""Most requests that a closed loop keeps running."""
