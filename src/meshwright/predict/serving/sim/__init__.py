"""Event simulation of serving: engines, requests, KV transfer, latency and metrics.

`simulation` runs `SimulatedEngine` replicas of a `ServingFleet`, and `serving_metrics` summarizes
the served requests.
"""
