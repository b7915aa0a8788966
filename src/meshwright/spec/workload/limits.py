"""The largest numbers of a workload: beyond any run, and small enough for exact sums."""

MOST_TOKENS = 10**18
"""Most tokens of a training run, and most requests of a stream."""
LONGEST = 10**9
"""Most tokens of one document, sequence, prompt or answer."""
MOST_IN_FLIGHT = 10**6
"""Most requests that a closed loop keeps running."""
