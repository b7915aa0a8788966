"""The `mw plan serve` command: the cheapest serving deployment that meets latency targets."""
