"""Detectors of inefficiency patterns in the timelines of one job.

Detectors register in `job_registry`; `job_findings` runs them on each rank and across ranks,
then merges and ranks the findings.
"""
