"""Where the GPU-hours of a cluster go, what wastes them, and what would give them back."""
