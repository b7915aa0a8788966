"""Why NCCL picks what it picks: segments of size with reasons, or the whole table of one size.

Everything here is data; `explain_words` says it in sentences. NCCL decides by its own estimate
(`nccl_us`); what we predict (`predicted_us`) has the fabric's corrections and may disagree: that is
what a tuner file is for (`tuner_rows`).
"""

from itertools import groupby
from math import ceil
from typing import Literal

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.predict.network.availability import Unavailable, unavailable
from meshwright.predict.network.constants import DEFAULT_NCCL, release
from meshwright.predict.network.contest import Candidate, Contest, check_question, contest
from meshwright.predict.network.curve import choices, curve
from meshwright.predict.network.placement import Placement
from meshwright.predict.network.tuning import Entry, Op, kernel_channels, table

Term = Literal["latency", "bandwidth", "both"]
Cap = Literal["", "ll_max", "ring_ll128", "tree_ll128", "tree", "nvls_tree"]
LARGEST_BYTES = 16 << 30
"""Where a segment without end is judged; sweeps of nccl-tests seldom go further."""


class Duel(msgspec.Struct, frozen=True, kw_only=True):
    """NCCL's choice at one size against the best of the others, by NCCL's estimate."""

    nbytes: int
    winner: Candidate
    runner_up: Candidate | None
    """None where there is no other candidate."""

    @property
    def margin(self) -> float:
        """Return how much longer the runner-up takes, over the winner's time."""
        if self.runner_up is None:
            return float("inf")
        return self.runner_up.nccl_us / self.winner.nccl_us - 1

    @property
    def decides(self) -> Term:
        """Return the term that the winner wins by."""
        if self.runner_up is None:
            return "both"
        latency = self.runner_up.latency_us - self.winner.latency_us
        stream = self.runner_up.stream_us - self.winner.stream_us
        if latency > 0 and stream > 0:
            return "both"
        return "latency" if latency > stream else "bandwidth"


class Anatomy(msgspec.Struct, frozen=True, kw_only=True):
    """What NCCL's estimate of one algorithm and protocol is made of."""

    base_us: float
    """Before any hop."""
    inside_hops: float
    """Hops inside a unit, one after the other."""
    inside_us: float
    """One of them."""
    between_hops: float
    """Hops between units, one after the other."""
    between_us: float
    """One of them."""
    gbps: float
    """Bytes of the message per nanosecond, before a tree's factor by size."""
    uncapped_gbps: float
    """The same without the cap."""
    cap: Cap
    """NCCL's table that holds it down; empty where the links do."""
    graph_channels: int
    """Channels of NCCL's search over the links."""
    channel_gbps: float
    """GB/s of each of them."""


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """A range of sizes for which NCCL picks the same algorithm and protocol."""

    start_bytes: int
    end_bytes: int | None
    """The last size of the range; None where it has no end."""
    algorithm: str
    """An algorithm, or pairwise and p2p for kernels that have no other."""
    protocol: str
    """Empty where there is no choice."""
    channels: tuple[int, int]
    """Channels of the smallest and of the largest message in the range."""
    ends: tuple[Duel, ...] = ()
    """The contest at both ends of the range; empty where there is no choice."""
    anatomy: Anatomy | None = None
    """None where there is no choice."""


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """NCCL's choice for one collective on one group, over all sizes."""

    op: Op
    ranks: int
    units: int
    nccl: str
    segments: tuple[Segment, ...]
    """In the order of size; none for a group of one."""
    unavailable: tuple[Unavailable, ...]
    notes: tuple[str, ...] = ()


class SizeExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """NCCL's whole cost table for one size."""

    op: Op
    ranks: int
    units: int
    nccl: str
    nbytes: int
    candidates: tuple[Candidate, ...]
    """By NCCL's estimate, its choice first."""
    unavailable: tuple[Unavailable, ...]

    @property
    def duel(self) -> Duel:
        """Return NCCL's choice and its runner-up."""
        second = self.candidates[1] if len(self.candidates) > 1 else None
        return Duel(nbytes=self.nbytes, winner=self.candidates[0], runner_up=second)

    @property
    def fastest(self) -> Candidate:
        """Return what we predict to be fastest; NCCL's order decides among equals."""
        return min(self.candidates, key=lambda candidate: candidate.predicted_us)


def explain(
    place: Placement,
    op: Op,
    *,
    nccl: str = DEFAULT_NCCL,
    collnet: bool = False,
    only: tuple[str, ...] | None = None,
) -> Explanation:
    """Return what NCCL picks for a collective by size, and why.

    The arguments are those of `collective`: `collnet` enables reductions in the fabric's switches,
    `only` restricts the algorithms.
    """
    check_question(op, 0, only)
    segments: tuple[Segment, ...] = ()
    missing: tuple[Unavailable, ...] = ()
    if place.ranks > 1 and op in ("all_to_all", "send_recv"):
        segments = _without_choice(place, op, nccl)
    elif place.ranks > 1:
        rules = contest(place, op, nccl, collnet, only)
        segments = _segments(rules, collnet, only)
        missing = unavailable(op, place, rules.entries, collnet=collnet, only=only)
    notes = []
    if collnet and place.units > 1 and not place.links.fabric_reduces:
        notes.append("CollNet is on, but this fabric's switches are described without reductions.")
    return Explanation(
        op=op,
        ranks=place.ranks,
        units=place.units,
        nccl=nccl,
        segments=segments,
        unavailable=missing,
        notes=tuple(notes),
    )


def explain_size(
    place: Placement,
    op: Op,
    nbytes: int,
    *,
    nccl: str = DEFAULT_NCCL,
    collnet: bool = False,
    only: tuple[str, ...] | None = None,
) -> SizeExplanation:
    """Return every algorithm and protocol with its cost for one size."""
    check_question(op, nbytes, only)
    problems = []
    if op in ("all_to_all", "send_recv"):
        what = f"{op} runs on send and receive kernels, which have no algorithms"
        problems.append(Problem("op", what, "ask collective() for its time"))
    if place.ranks == 1:
        problems.append(Problem("place", "a group of one sends nothing", "give two ranks or more"))
    if problems:
        raise InputError(problems)
    rules = contest(place, op, nccl, collnet, only)
    return SizeExplanation(
        op=op,
        ranks=place.ranks,
        units=place.units,
        nccl=nccl,
        nbytes=nbytes,
        candidates=rules.at(nbytes),
        unavailable=unavailable(op, place, rules.entries, collnet=collnet, only=only),
    )


def _without_choice(place: Placement, op: Op, nccl: str) -> tuple[Segment, ...]:
    """Return the channels of send and receive kernels by size."""
    name = "pairwise" if op == "all_to_all" else "p2p"
    pieces = curve(place, op, nccl).pieces
    runs = [next(run) for _, run in groupby(pieces, key=lambda piece: piece.channels)]
    starts = [ceil(piece.start_bytes) for piece in runs]
    return tuple(
        Segment(
            start_bytes=start,
            end_bytes=None if following is None else following - 1,
            algorithm=name,
            protocol="",
            channels=(piece.channels, piece.channels),
        )
        for piece, start, following in zip(runs, starts, [*starts[1:], None], strict=True)
    )


def _segments(rules: Contest, collnet: bool, only: tuple[str, ...] | None) -> tuple[Segment, ...]:
    """Join NCCL's choices by size where only a tree's factor changes."""
    found = choices(rules.place, rules.op, rules.nccl, collnet, only)
    runs = [next(run) for _, run in groupby(found, key=lambda choice: choice.entry)]
    starts = [ceil(choice.start_bytes) for choice in runs]
    segments = []
    for choice, start, following in zip(runs, starts, [*starts[1:], None], strict=True):
        if start == following:
            # It holds between two whole sizes, so no message has it.
            continue
        end = None if following is None else following - 1
        last = max(start, LARGEST_BYTES) if end is None else end
        entry, most = choice.entry, choice.channels
        segments.append(
            Segment(
                start_bytes=start,
                end_bytes=end,
                algorithm=entry.algorithm,
                protocol=entry.protocol,
                channels=(
                    kernel_channels(entry, rules.place, start, most),
                    kernel_channels(entry, rules.place, last, most),
                ),
                ends=(_duel(rules, entry, start), _duel(rules, entry, last)),
                anatomy=_anatomy(rules, entry, collnet),
            )
        )
    return tuple(segments)


def _duel(rules: Contest, entry: Entry, nbytes: int) -> Duel:
    """Return the segment's own choice against the best of the others.

    Where two lines cross, rounding may put either first, so the winner is given.
    """
    own = (entry.algorithm, entry.protocol)
    others = [item for item in rules.at(nbytes) if (item.algorithm, item.protocol) != own]
    winner = rules.candidate(entry, nbytes)
    return Duel(nbytes=nbytes, winner=winner, runner_up=others[0] if others else None)


_CAPS: tuple[Cap, ...] = ("ll_max", "ring_ll128", "tree_ll128", "tree", "nvls_tree")
_NO_CAP = ((1e9,) * 3,) * 4


def _anatomy(rules: Contest, entry: Entry, collnet: bool) -> Anatomy:
    """Take an estimate apart; a cap holds where lifting it alone gives more bandwidth."""
    constants, place = release(rules.nccl), rules.place
    holding: Cap = ""
    uncapped = entry.algbw_gbps
    for cap in _CAPS:
        lifted = msgspec.structs.replace(
            constants, caps=msgspec.structs.replace(constants.caps, **{cap: _NO_CAP})
        )
        freed = table(rules.op, place, rules.found, lifted, collnet=collnet)
        same = [e for e in freed if (e.algorithm, e.protocol) == (entry.algorithm, entry.protocol)]
        if same and same[0].algbw_gbps > uncapped * (1 + 1e-9):
            holding, uncapped = cap, same[0].algbw_gbps
    graph = rules.graph(entry)
    # NCCL multiplies channels by their speed inside a node up to two nodes, and between them above.
    speed = graph.intra if place.units <= 2 else graph.inter
    return Anatomy(
        base_us=entry.base_us,
        inside_hops=entry.inside,
        inside_us=entry.inside_us,
        between_hops=entry.between,
        between_us=entry.between_us,
        gbps=entry.algbw_gbps,
        uncapped_gbps=uncapped,
        cap=holding,
        graph_channels=graph.channels,
        channel_gbps=speed,
    )
