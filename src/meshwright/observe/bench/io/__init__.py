"""Benchmarks of storage and of the training data loader."""
