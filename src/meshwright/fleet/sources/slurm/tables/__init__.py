"""Converts Slurm records to rows of the shared job, node and allocation tables."""
