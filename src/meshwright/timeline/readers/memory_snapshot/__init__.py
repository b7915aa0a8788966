"""Reads PyTorch CUDA memory snapshots into columns."""
