"""How kube-state-metrics' series are asked for: their newest values, and their course."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from meshwright.fleet.sources.prometheus.client import PrometheusClient
from meshwright.fleet.sources.prometheus.query import PrometheusScope
from meshwright.fleet.sources.prometheus.response import TimeSeries

STEP_S = 60.0
PodKey = tuple[str, str, str]
"""Namespace, name and uid."""


class StateMetricsQuery(NamedTuple):
    """Whom to ask about which time."""

    client: PrometheusClient
    scope: PrometheusScope
    since_s: float
    until_s: float

    @property
    def promql_range(self) -> str:
        """The whole time, as PromQL writes it."""
        return f"{max(60, round(self.until_s - self.since_s))}s"

    def query_last(self, metric: str, *matchers: str) -> list[TimeSeries]:
        """Ask for the newest value that each series had in this time."""
        if metric not in self.scope.metric_names:
            return []
        return self.client.query_instant(
            f"last_over_time({self.scope.build_selector(metric, *matchers)}[{self.promql_range}])",
            self.until_s,
        )

    def query_pods(self, metric: str, *matchers: str) -> dict[PodKey, TimeSeries]:
        """Ask for the newest value of each pod."""
        return {parse_pod_key(each.labels): each for each in self.query_last(metric, *matchers)}

    def query_last_true(self, metric: str) -> dict[PodKey, float]:
        """Ask when a metric was last one.

        The time of the sample itself is wanted: a server shows it for some minutes more.
        """
        inner = f"(timestamp({metric}) and {metric} == 1)[{self.promql_range}:{round(STEP_S)}s]"
        found = self.client.query_instant(f"max_over_time({inner})", self.until_s)
        times: dict[PodKey, float] = {}
        for each in found:
            pod = parse_pod_key(each.labels)
            times[pod] = max(times.get(pod, 0.0), float(each.values[-1]))
        return times

    def query_range(self, expression: str) -> list[TimeSeries]:
        """Ask for every minute."""
        start_s = STEP_S * np.ceil(self.since_s / STEP_S)
        return self.client.query_range(expression, start_s, self.until_s, STEP_S)


def parse_pod_key(labels: Mapping[str, str]) -> PodKey:
    """Name a pod; `exported_…` are its own labels where Prometheus put the exporter's over them."""
    space = labels.get("exported_namespace") or labels.get("namespace", "")
    return space, labels.get("exported_pod") or labels.get("pod", ""), labels.get("uid", "")
