"""How kube-state-metrics' series are asked for: their newest values, and their course."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from meshwright.observe.fleet.sources.prometheus.answers import Series
from meshwright.observe.fleet.sources.prometheus.asking import Fleet
from meshwright.observe.fleet.sources.prometheus.client import Prometheus

STEP_S = 60.0
Pod = tuple[str, str, str]
"""Namespace, name and uid."""


class Ask(NamedTuple):
    """Whom to ask about which time."""

    server: Prometheus
    fleet: Fleet
    since_s: float
    until_s: float

    @property
    def span(self) -> str:
        """The whole time, as PromQL writes it."""
        return f"{max(60, round(self.until_s - self.since_s))}s"

    def last(self, metric: str, *matchers: str) -> list[Series]:
        """Ask for the newest value that each series had in this time."""
        if metric not in self.fleet.names:
            return []
        return self.server.query(
            f"last_over_time({self.fleet.of(metric, *matchers)}[{self.span}])", self.until_s
        )

    def pods(self, metric: str, *matchers: str) -> dict[Pod, Series]:
        """Ask for the newest value of each pod."""
        return {pod_of(each.labels): each for each in self.last(metric, *matchers)}

    def last_true(self, metric: str) -> dict[Pod, float]:
        """Ask when a metric was last one.

        The time of the sample itself is wanted: a server shows it for some minutes more.
        """
        inner = f"(timestamp({metric}) and {metric} == 1)[{self.span}:{round(STEP_S)}s]"
        found = self.server.query(f"max_over_time({inner})", self.until_s)
        times: dict[Pod, float] = {}
        for each in found:
            pod = pod_of(each.labels)
            times[pod] = max(times.get(pod, 0.0), float(each.values[-1]))
        return times

    def steps(self, expression: str) -> list[Series]:
        """Ask for every minute."""
        start_s = STEP_S * np.ceil(self.since_s / STEP_S)
        return self.server.query_range(expression, start_s, self.until_s, STEP_S)


def pod_of(labels: Mapping[str, str]) -> Pod:
    """Name a pod; `exported_…` are its own labels where Prometheus put the exporter's over them."""
    space = labels.get("exported_namespace") or labels.get("namespace", "")
    return space, labels.get("exported_pod") or labels.get("pod", ""), labels.get("uid", "")
