"""KV cache transfer between engines over shared memory, TCP or NIXL."""
