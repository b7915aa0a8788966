"""Engine clients: engines in a thread or a subprocess, routed and disaggregated engines.

The HTTP server calls any of them through the `EngineClient` interface.
"""
