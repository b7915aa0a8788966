"""What is asked of a fleet's Prometheus, whichever tables the answer goes into."""

from typing import NamedTuple

from meshwright.observe.fleet.sources.prometheus.answers import Series
from meshwright.observe.fleet.sources.prometheus.client import Prometheus
from meshwright.observe.fleet.sources.prometheus.grid import Grid, window
from meshwright.observe.fleet.sources.prometheus.labels import Naming


class Fleet(NamedTuple):
    """The fleet as this server knows it."""

    cluster: str
    names: frozenset[str]
    """Metrics that there are."""
    selector: str = ""
    """Matchers, such as `cluster="a"`, for a server that holds several fleets."""
    naming: Naming = Naming()
    scrape_s: float = 30.0
    """How far the samples on the server are apart."""

    def of(self, metric: str, *matchers: str) -> str:
        """Return the selector of a metric of this fleet."""
        inside = ",".join(each for each in (self.selector, *matchers) if each)
        return f"{metric}{{{inside}}}" if inside else metric

    def rate_window(self, step_s: float) -> str:
        """Return a stretch that holds enough samples for a rate, even where one is missing."""
        return window(max(step_s, 4 * self.scrape_s))


class Slice(NamedTuple):
    """A slice of time of a fleet, and who is asked about it."""

    server: Prometheus
    fleet: Fleet
    grid: Grid

    def ask(self, expression: str) -> list[Series]:
        """Ask for an expression at every moment of the slice."""
        grid = self.grid
        return self.server.query_range(expression, grid.start_s, grid.end_s, grid.step_s)

    def ask_at_end(self, expression: str) -> list[Series]:
        """Ask for an expression at its last moment."""
        return self.server.query(expression, self.grid.end_s)
