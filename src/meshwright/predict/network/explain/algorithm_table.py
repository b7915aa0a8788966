"""`AlgorithmTable`: the algorithms and protocols that NCCL compares for one collective.

Each candidate of a size carries NCCL's own estimate, which decides, and our price, which has the
fabric's corrections. Why one wins is told in `explain`; what to do about it in `tuner_rows`.
"""

from functools import lru_cache
from typing import NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.predict.network.collective_cost import OPS
from meshwright.predict.network.cost_curve import NcclChoice, compute_choice_costs
from meshwright.predict.network.explain.availability import TITLES, list_unavailable
from meshwright.predict.network.link_corrections import (
    LinkCorrection,
    get_link_kinds,
    load_corrections,
)
from meshwright.predict.network.nccl_constants import ALGORITHMS, Algorithm, Protocol, get_release
from meshwright.predict.network.nccl_graph import NcclGraph, NcclGraphs, find_graphs
from meshwright.predict.network.nccl_tuning import (
    NcclOp,
    TuningEntry,
    build_tuning_table,
    count_comm_channels,
    count_kernel_channels,
    count_nvls_channels,
    nccl_us,
    plateau_bytes,
    plateau_factor,
)
from meshwright.predict.network.placement import Placement
from meshwright.predict.network.wire_bound import bound_s_per_byte
from meshwright.spec.name_suggestions import build_unknown_name_problem


class AlgorithmCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """One algorithm with one protocol at one size."""

    algorithm: Algorithm
    protocol: Protocol
    nccl_us: float
    """NCCL's own estimate, which decides."""
    latency_us: float
    """The part of it that no size changes."""
    stream_us: float
    """The part that bytes over bandwidth take."""
    predicted_us: float
    """Ours: with what measurements of this kind of link add."""
    channels: int
    """Channels that the kernel would run on."""

    @property
    def title(self) -> str:
        """Return its name as NCCL writes it, such as Ring/LL128."""
        return format_algorithm(self.algorithm, self.protocol)


class AlgorithmTable(NamedTuple):
    """What NCCL compares for one collective on one group."""

    placement: Placement
    op: NcclOp
    nccl: str
    graphs: NcclGraphs
    entries: tuple[TuningEntry, ...]
    ring_channels: int
    nvls_channels: int
    links: tuple[LinkCorrection, LinkCorrection | None]

    def list_candidates(self, nbytes: int) -> tuple[AlgorithmCandidate, ...]:
        """Return every candidate at a size, NCCL's choice first."""
        # `sorted` keeps the order of equals, so ring is before tree there, as in `choices`.
        return tuple(
            sorted((self.get_candidate(entry, nbytes) for entry in self.entries), key=_by_nccl)
        )

    def get_candidate(self, entry: TuningEntry, nbytes: int) -> AlgorithmCandidate:
        """Return one of them."""
        estimate_us = nccl_us(entry, self.op, self.placement, nbytes, self.ring_channels)
        latency_us = entry.latency_us
        if nbytes >= plateau_bytes(entry, self.op, self.placement, self.ring_channels):
            latency_us *= plateau_factor(self.placement)
        most = self.max_channels(entry)
        ((_, cost, _, _),) = compute_choice_costs(
            [NcclChoice(float(nbytes), entry, most)], self.placement, self.op, self.nccl, self.links
        )
        least_s = nbytes * bound_s_per_byte(self.op, self.placement)
        return AlgorithmCandidate(
            algorithm=entry.algorithm,
            protocol=entry.protocol,
            nccl_us=estimate_us,
            latency_us=latency_us,
            stream_us=estimate_us - latency_us,
            predicted_us=max(cost.predict_s(nbytes), least_s) * 1e6,
            channels=count_kernel_channels(entry, self.placement, nbytes, most),
        )

    def max_channels(self, entry: TuningEntry) -> int:
        """Return the channels that an algorithm's kernel runs on at most."""
        return self.nvls_channels if entry.algorithm.startswith("nvls") else self.ring_channels

    def get_graph(self, entry: TuningEntry) -> NcclGraph:
        """Return the search result that an algorithm's bandwidth comes from."""
        if entry.algorithm.startswith("nvls") and self.graphs.nvls is not None:
            return self.graphs.nvls
        rings = entry.algorithm in ("ring", "pat")
        return self.graphs.ring if rings else self.graphs.tree


@lru_cache(maxsize=1024)
def build_algorithm_table(
    place: Placement, op: NcclOp, nccl: str, collnet: bool, only: tuple[str, ...] | None
) -> AlgorithmTable:
    """Return NCCL's table for a collective with algorithms, on a group of at least two ranks."""
    constants = get_release(nccl)
    found = find_graphs(place, constants)
    entries = build_tuning_table(op, place, found, constants, collnet=collnet)
    allowed = tuple(entry for entry in entries if only is None or entry.algorithm in only)
    if not allowed:
        missing = list_unavailable(op, place, entries, collnet=collnet, only=None)
        why = "; ".join(item.reason for item in missing if only and item.algorithm in only)
        what = f"no algorithm is left for {op}: {why}"
        raise InputError([Problem("only", what, "add ring, which serves every collective")])
    inside, fabric = get_link_kinds(place)
    between = load_corrections()[fabric] if place.domains > 1 else None
    return AlgorithmTable(
        placement=place,
        op=op,
        nccl=nccl,
        graphs=found,
        entries=allowed,
        ring_channels=count_comm_channels(place, found),
        nvls_channels=count_nvls_channels(place, constants),
        links=(load_corrections()[inside], between),
    )


def _by_nccl(candidate: AlgorithmCandidate) -> float:
    return candidate.nccl_us


def format_algorithm(algorithm: str, protocol: str) -> str:
    """Return a choice as NCCL writes it, such as Ring/LL128."""
    names = [TITLES.get(algorithm, algorithm), TITLES.get(protocol, protocol)]
    return "/".join(name for name in names if name)


def check_call(op: str, nbytes: float, only: tuple[str, ...] | None) -> None:
    """Refuse a collective, size or algorithm that does not exist; every fault is listed."""
    problems = []
    if op not in OPS:
        problems.append(build_unknown_name_problem("collective", op, OPS, "op"))
    if not 0 <= nbytes < float("inf"):
        problems.append(Problem("nbytes", f"{nbytes!r} is not a size", "use 0 or more bytes"))
    strange = [name for name in only or () if name not in ALGORITHMS]
    problems += [
        build_unknown_name_problem("algorithm", name, ALGORITHMS, "only") for name in strange
    ]
    if problems:
        raise InputError(problems)
