"""The `mw simulate serve` command: predicted latency and throughput of a serving deployment."""
