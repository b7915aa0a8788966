"""Kubernetes: its pods as jobs, and its nodes; from its API, or from kube-state-metrics."""

from pathlib import Path

from meshwright.observe.fleet.sources.source import Asked, Source

__all__ = ["claims", "source"]


def claims(where: str) -> bool:
    """Say whether this is `kubernetes:CONTEXT` or a kubeconfig file."""
    if where.startswith("kubernetes:"):
        return True
    path = Path(where)
    if "://" in where or not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(8192)
    return b"kind: Config" in head and b"clusters:" in head


def source(where: str, asked: Asked) -> Source:
    """Open a cluster."""
    from meshwright.observe.fleet.sources.kubernetes.api import open_source

    return open_source(where, asked)
