"""Training runs over weeks: failures, checkpoint cost, restarts, spare nodes and goodput."""
