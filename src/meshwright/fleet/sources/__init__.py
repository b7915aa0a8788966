"""Telemetry sources: Slurm, Prometheus, Kubernetes, kernel logs, public traces and table files.

Every source implements `TelemetrySource`; `source_registry` opens the one for a path or URL.
"""
