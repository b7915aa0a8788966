"""Weight transfer plans between trainer ranks and engine ranks, computed on tensor boxes."""
