"""Benchmarks of executed collectives, with MPI and torch.distributed baselines."""
