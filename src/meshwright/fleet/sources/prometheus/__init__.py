"""Prometheus and servers with its HTTP API: Thanos, Mimir, VictoriaMetrics."""
