"""Context parallelism: ring, all-gather and Ulysses attention over sequence shards.

`token_partition` assigns tokens to ranks, and `context_parallel` applies a scheme to a decoder.
"""
