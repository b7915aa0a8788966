"""Span primitives for analyses: device spans, intervals, steps, call stacks and row selection.

Every analysis builds on these modules to choose and measure the spans of a rank.
"""
