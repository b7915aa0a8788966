"""The layout search space: GPU splits, shapes, schedules, recompute and sharding options.

Modules enumerate the options of one dimension and cache their time and memory costs.
"""
