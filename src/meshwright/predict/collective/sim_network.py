"""`SimNetwork`: directed links and the ways over them, for simulating collectives.

Ends of ways are GPUs, by number, and switches that hold data, by name. It knows rates and
latencies; `build_cluster_network` makes one from a `Cluster` by arithmetic, `build_graph_network`
one from any `LinkGraph` by search.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError, Problem
from meshwright.spec.name_suggestions import build_unknown_name_problem

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]
NO_LINK = -1
"""Fills up the ways that are shorter than the longest one."""


class CollectiveCall(NamedTuple):
    """A collective without its algorithm."""

    op: str
    members: tuple[int, ...]
    """The GPUs of its ranks."""
    nbytes: float
    root: int
    """The GPU that gives or gets, where one does."""
    reduces: bool
    """Whether switches may add up what passes through them."""


class RouteTable(NamedTuple):
    """Ways, one row per pair of ends."""

    links: Longs
    """Their links, filled up with `NO_LINK`."""
    shares: Floats | None = None
    """The part of a message on each link, where ways divide; None where each carries all of it."""

    def sum_latency_s(self, latency_s: Floats) -> Floats:
        """Return the latency of each way, from that of all links.

        Paths over which a way divides are equally late, so the mean over the links is exact.
        """
        parts = np.where(self.links != NO_LINK, latency_s[self.links], 0.0)
        total: Floats = (parts if self.shares is None else parts * self.shares).sum(axis=1)
        return total


class SimNetwork:
    """Links with a rate and a latency, and the links of the way between any two ends."""

    def __init__(
        self,
        *,
        name: str,
        gpus: int,
        switches: Sequence[str],
        domains: Longs,
        link_bytes_per_s: Floats,
        latency_s: Floats,
        link_name: Callable[[int], str],
        routes: Callable[[Longs, Longs], RouteTable],
        bound_s: "Callable[[CollectiveCall], float] | None" = None,
    ) -> None:
        self.name = name
        self.gpus = gpus
        """GPUs are the ends 0 to `gpus` - 1; switches follow."""
        self.switches = tuple(switches)
        self.domains = domains
        """Per end, the node (or larger scale-up domain) it is in; switches outside have -1."""
        self.link_bytes_per_s = link_bytes_per_s
        self.latency_s = latency_s
        """Per link, what crossing it costs an empty message."""
        self._link_name = link_name
        self._routes = routes
        self._bound_s = bound_s

    def link_name(self, link: int) -> str:
        """Return what joins what, such as `gpu0→nvswitch0`."""
        return self._link_name(int(link))

    def find_routes(self, source: Longs, target: Longs) -> RouteTable:
        """Return the links of each way, one row per pair."""
        return self._routes(source, target)

    def get_endpoints(
        self, members: Sequence[int] | None, ranks: int, switches: Sequence[str]
    ) -> Longs:
        """Return the ends of a collective's places: its ranks' GPUs, then its switches."""
        gpus = list(range(ranks)) if members is None else [int(gpu) for gpu in members]
        problems = []
        if len(gpus) != ranks:
            what = f"{len(gpus)} GPUs for {ranks} ranks"
            problems.append(Problem("members", what, "name one GPU per rank"))
        outside = [gpu for gpu in gpus if not 0 <= gpu < self.gpus]
        if outside:
            what = f"{self.name} has no GPU {outside[0]}"
            fix = f"use 0 to {self.gpus - 1}"
            if members is None:
                what, fix = f"{ranks} ranks on {self.gpus} GPUs of {self.name}", "use fewer ranks"
            problems.append(Problem("members", what, fix))
        elif len(set(gpus)) != len(gpus):
            problems.append(Problem("members", "a GPU is named twice", "name each GPU once"))
        known = {name: self.gpus + index for index, name in enumerate(self.switches)}
        strange = next((name for name in switches if name not in known), None)
        if strange is not None:
            problems.append(build_unknown_name_problem("switch", strange, known, "switches"))
        if problems:
            raise InputError(problems)
        return np.array([*gpus, *(known[name] for name in switches)], dtype=np.int64)

    def bound_s(self, ask: CollectiveCall) -> float:
        """Return the least time that the wires allow a collective, whatever the algorithm."""
        return 0.0 if len(ask.members) < 2 or self._bound_s is None else self._bound_s(ask)
