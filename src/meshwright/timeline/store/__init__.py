"""Timelines on disk: Parquet files per rank, written in segments, and their repair.

`timeline_folder` reads and writes whole timelines; `TimelineWriter` appends spans while they
happen.
"""
