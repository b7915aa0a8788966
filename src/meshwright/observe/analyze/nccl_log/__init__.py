"""Analysis of NCCL_DEBUG logs: communicators, transports, call totals, warnings and findings."""
