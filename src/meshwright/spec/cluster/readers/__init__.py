"""Reads cluster topology from NCCL, nvidia-smi and Slurm files."""
