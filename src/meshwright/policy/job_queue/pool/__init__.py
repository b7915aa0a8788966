"""GPU pools for job queues: whole-node and shared-GPU pools, placement and fragmentation.

Pools implement `GpuPool`; `placement` and `scorers` decide which nodes a job gets.
"""
