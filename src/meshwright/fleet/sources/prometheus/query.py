"""What is asked of a fleet's Prometheus, whichever tables the answer goes into."""

from typing import NamedTuple

from meshwright.fleet.sources.prometheus.client import PrometheusClient
from meshwright.fleet.sources.prometheus.labels import NodeNaming
from meshwright.fleet.sources.prometheus.response import TimeSeries
from meshwright.fleet.sources.prometheus.time_grid import TimeGrid, format_promql_range


class PrometheusScope(NamedTuple):
    """The fleet as this server knows it."""

    cluster: str
    metric_names: frozenset[str]
    """Metrics that there are."""
    selector: str = ""
    """Matchers, such as `cluster="a"`, for a server that holds several fleets."""
    node_naming: NodeNaming = NodeNaming()
    scrape_interval_s: float = 30.0
    """How far the samples on the server are apart."""

    def build_selector(self, metric: str, *matchers: str) -> str:
        """Return the selector of a metric of this fleet."""
        inside = ",".join(each for each in (self.selector, *matchers) if each)
        return f"{metric}{{{inside}}}" if inside else metric

    def format_rate_window(self, step_s: float) -> str:
        """Return a stretch that holds enough samples for a rate, even where one is missing."""
        return format_promql_range(max(step_s, 4 * self.scrape_interval_s))


class QueryWindow(NamedTuple):
    """A slice of time of a fleet, and who is asked about it."""

    client: PrometheusClient
    scope: PrometheusScope
    grid: TimeGrid

    def query_range(self, expression: str) -> list[TimeSeries]:
        """Ask for an expression at every moment of the slice."""
        grid = self.grid
        return self.client.query_range(expression, grid.start_s, grid.end_s, grid.step_s)

    def query_instant(self, expression: str) -> list[TimeSeries]:
        """Ask for an expression at its last moment."""
        return self.client.query_instant(expression, self.grid.end_s)
