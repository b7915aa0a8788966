"""Studies built on the layout search: sweeps, Pareto fronts, bottlenecks and inverse questions.

Each study calls the layout search repeatedly with varied questions.
"""
