"""Parsers for Slurm output: sacct, scontrol, JSON, hostlists, TRES, states and local times."""
