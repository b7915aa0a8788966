"""ZeRO and FSDP sharding: gradient buckets, reduction, shards and parameter gathers.

`GradientSync` coordinates one step; buckets, reducers and shards implement it.
"""
