"""Reads JSON records of the NCCL Inspector plugin."""
