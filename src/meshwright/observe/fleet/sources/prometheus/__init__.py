"""Prometheus and what speaks its HTTP API: Thanos, Mimir, VictoriaMetrics."""

from meshwright.observe.fleet.sources.prometheus.client import Patience, Prometheus
from meshwright.observe.fleet.sources.prometheus.source import PrometheusSource, open_source
from meshwright.observe.fleet.sources.source import Asked, Source

__all__ = ["Patience", "Prometheus", "PrometheusSource", "claims", "source"]


def claims(where: str) -> bool:
    """Say whether this is a URL; whoever has a sharper eye for some was asked before."""
    return where.startswith(("http://", "https://", "prometheus+http://", "prometheus+https://"))


def source(where: str, asked: Asked) -> Source:
    """Open the server at a URL."""
    return open_source(where, asked)
