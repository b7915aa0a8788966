"""`Contest`: every algorithm and protocol that NCCL compares for one collective on one group.

Each candidate of a size carries NCCL's own estimate, which decides, and our price, which has the
fabric's corrections. Why one wins is told in `explain`; what to do about it in `tuner_rows`.
"""

from functools import lru_cache
from typing import NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.predict.network.availability import TITLES, unavailable
from meshwright.predict.network.bounds import bound_s_per_byte
from meshwright.predict.network.collective import OPS
from meshwright.predict.network.constants import ALGORITHMS, Algorithm, Protocol, release
from meshwright.predict.network.curve import Choice, priced
from meshwright.predict.network.fabric import Correction, corrections, kinds
from meshwright.predict.network.graph import Graph, Graphs, graphs
from meshwright.predict.network.placement import Placement
from meshwright.predict.network.tuning import (
    Entry,
    Op,
    comm_channels,
    kernel_channels,
    nccl_us,
    nvls_channels,
    plateau_bytes,
    plateau_factor,
    table,
)
from meshwright.spec.names import unknown_name


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
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
        return titled(self.algorithm, self.protocol)


class Contest(NamedTuple):
    """What NCCL compares for one collective on one group."""

    place: Placement
    op: Op
    nccl: str
    found: Graphs
    entries: tuple[Entry, ...]
    ring_channels: int
    nvls_channels: int
    links: tuple[Correction, Correction | None]

    def at(self, nbytes: int) -> tuple[Candidate, ...]:
        """Return every candidate at a size, NCCL's choice first."""
        # `sorted` keeps the order of equals, so ring is before tree there, as in `choices`.
        return tuple(
            sorted((self.candidate(entry, nbytes) for entry in self.entries), key=_by_nccl)
        )

    def candidate(self, entry: Entry, nbytes: int) -> Candidate:
        """Return one of them."""
        estimate_us = nccl_us(entry, self.op, self.place, nbytes, self.ring_channels)
        latency_us = entry.latency_us
        if nbytes >= plateau_bytes(entry, self.op, self.place, self.ring_channels):
            latency_us *= plateau_factor(self.place)
        most = self.most_channels(entry)
        ((_, cost, _, _),) = priced(
            [Choice(float(nbytes), entry, most)], self.place, self.op, self.nccl, self.links
        )
        least_s = nbytes * bound_s_per_byte(self.op, self.place)
        return Candidate(
            algorithm=entry.algorithm,
            protocol=entry.protocol,
            nccl_us=estimate_us,
            latency_us=latency_us,
            stream_us=estimate_us - latency_us,
            predicted_us=max(cost.seconds(nbytes), least_s) * 1e6,
            channels=kernel_channels(entry, self.place, nbytes, most),
        )

    def most_channels(self, entry: Entry) -> int:
        """Return the channels that an algorithm's kernel runs on at most."""
        return self.nvls_channels if entry.algorithm.startswith("nvls") else self.ring_channels

    def graph(self, entry: Entry) -> Graph:
        """Return the search result that an algorithm's bandwidth comes from."""
        if entry.algorithm.startswith("nvls") and self.found.nvls is not None:
            return self.found.nvls
        rings = entry.algorithm in ("ring", "pat")
        return self.found.ring if rings else self.found.tree


@lru_cache(maxsize=1024)
def contest(
    place: Placement, op: Op, nccl: str, collnet: bool, only: tuple[str, ...] | None
) -> Contest:
    """Return NCCL's table for a collective with algorithms, on a group of at least two ranks."""
    constants = release(nccl)
    found = graphs(place, constants)
    entries = table(op, place, found, constants, collnet=collnet)
    allowed = tuple(entry for entry in entries if only is None or entry.algorithm in only)
    if not allowed:
        missing = unavailable(op, place, entries, collnet=collnet, only=None)
        why = "; ".join(item.why for item in missing if only and item.algorithm in only)
        what = f"no algorithm is left for {op}: {why}"
        raise InputError([Problem("only", what, "add ring, which serves every collective")])
    inside, fabric = kinds(place)
    between = corrections()[fabric] if place.units > 1 else None
    return Contest(
        place=place,
        op=op,
        nccl=nccl,
        found=found,
        entries=allowed,
        ring_channels=comm_channels(place, found),
        nvls_channels=nvls_channels(place, constants),
        links=(corrections()[inside], between),
    )


def _by_nccl(candidate: Candidate) -> float:
    return candidate.nccl_us


def titled(algorithm: str, protocol: str) -> str:
    """Return a choice as NCCL writes it, such as Ring/LL128."""
    names = [TITLES.get(algorithm, algorithm), TITLES.get(protocol, protocol)]
    return "/".join(name for name in names if name)


def check_question(op: str, nbytes: float, only: tuple[str, ...] | None) -> None:
    """Refuse a collective, size or algorithm that does not exist; every fault is listed."""
    problems = []
    if op not in OPS:
        problems.append(unknown_name("collective", op, OPS, "op"))
    if not 0 <= nbytes < float("inf"):
        problems.append(Problem("nbytes", f"{nbytes!r} is not a size", "use 0 or more bytes"))
    strange = [name for name in only or () if name not in ALGORITHMS]
    problems += [unknown_name("algorithm", name, ALGORITHMS, "only") for name in strange]
    if problems:
        raise InputError(problems)
