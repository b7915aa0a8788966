"""`mw memory`: GPU memory in a CUDA memory snapshot, by category and over time."""
