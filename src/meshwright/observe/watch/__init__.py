"""Watching a job while it runs: when to look, what to keep, what to tell.

The modules here run in the watcher, beside the job, and hold every decision as plain functions;
`agent` runs inside the job's processes and carries them out.
"""
