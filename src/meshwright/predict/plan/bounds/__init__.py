"""Lower bounds on step time and memory for the branch-and-bound layout search."""
