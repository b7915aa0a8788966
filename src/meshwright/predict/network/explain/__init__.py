"""Explains which algorithm and protocol NCCL selects for a collective, and why."""
