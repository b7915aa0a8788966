"""Exhaustive search and random sampling of layouts, to validate the branch-and-bound planner."""
