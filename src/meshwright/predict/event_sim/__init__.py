"""Event simulation of one training step: passes, collectives, jitter and replicas.

`step_simulation` runs the pipeline schedule with predicted durations, `replicas` simulates every
data-parallel replica, and `step_timeline` converts the result to a `Timeline`.
"""
