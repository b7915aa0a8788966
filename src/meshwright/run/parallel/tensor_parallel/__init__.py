"""Tensor and sequence parallelism, overlapped products and vocabulary sharding."""
