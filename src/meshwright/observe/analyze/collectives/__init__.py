"""Collectives matched across ranks: clock alignment, bandwidth, stragglers and slow links.

`collective_calls` extracts the calls of each rank, `clock_alignment` and `matched_collectives`
align and match them, and `stragglers` and `slow_ranks` interpret the result.
"""
