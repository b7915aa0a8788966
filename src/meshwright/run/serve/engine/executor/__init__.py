"""Model executors: the interface, the tensor-parallel executor and its follower ranks."""
