"""Why NCCL picks what it picks: segments of size with reasons, or the whole table of one size.

Everything here is data; `explanation_text` says it in sentences. NCCL decides by its own estimate
(`nccl_us`); what we predict (`predicted_us`) has the fabric's corrections and may disagree: that is
what a tuner file is for (`tuner_rows`).
"""

from itertools import groupby
from math import ceil
from typing import Literal

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.predict.network.cost_curve import build_curve, list_nccl_choices
from meshwright.predict.network.explain.algorithm_table import (
    AlgorithmCandidate,
    AlgorithmTable,
    build_algorithm_table,
    check_call,
)
from meshwright.predict.network.explain.availability import UnavailableAlgorithm, list_unavailable
from meshwright.predict.network.nccl_constants import DEFAULT_NCCL, get_release
from meshwright.predict.network.nccl_tuning import (
    NcclOp,
    TuningEntry,
    build_tuning_table,
    count_kernel_channels,
)
from meshwright.predict.network.placement import Placement

CostTerm = Literal["latency", "bandwidth", "both"]
BandwidthCap = Literal["", "ll_max", "ring_ll128", "tree_ll128", "tree", "nvls_tree"]
LARGEST_BYTES = 16 << 30
"""Where a segment without end is judged; sweeps of nccl-tests seldom go further."""


class ChoiceMargin(msgspec.Struct, frozen=True, kw_only=True):
    """NCCL's choice at one size against the best of the others, by NCCL's estimate."""

    nbytes: int
    winner: AlgorithmCandidate
    runner_up: AlgorithmCandidate | None
    """None where there is no other candidate."""

    @property
    def margin(self) -> float:
        """Return how much longer the runner-up takes, over the winner's time."""
        if self.runner_up is None:
            return float("inf")
        return self.runner_up.nccl_us / self.winner.nccl_us - 1

    @property
    def deciding_term(self) -> CostTerm:
        """Return the term that the winner wins by."""
        if self.runner_up is None:
            return "both"
        latency = self.runner_up.latency_us - self.winner.latency_us
        stream = self.runner_up.stream_us - self.winner.stream_us
        if latency > 0 and stream > 0:
            return "both"
        return "latency" if latency > stream else "bandwidth"


class EstimateBreakdown(msgspec.Struct, frozen=True, kw_only=True):
    """What NCCL's estimate of one algorithm and protocol is made of."""

    base_us: float
    """Before any hop."""
    intra_hops: float
    """Hops inside a unit, one after the other."""
    intra_hop_us: float
    """One of them."""
    inter_hops: float
    """Hops between units, one after the other."""
    inter_hop_us: float
    """One of them."""
    gbps: float
    """Bytes of the message per nanosecond, before a tree's factor by size."""
    uncapped_gbps: float
    """The same without the cap."""
    cap: BandwidthCap
    """NCCL's table that holds it down; empty where the links do."""
    graph_channels: int
    """Channels of NCCL's search over the links."""
    channel_gbps: float
    """GB/s of each of them."""


class ChoiceSegment(msgspec.Struct, frozen=True, kw_only=True):
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
    margins: tuple[ChoiceMargin, ...] = ()
    """The contest at both ends of the range; empty where there is no choice."""
    estimate: EstimateBreakdown | None = None
    """None where there is no choice."""


class NcclExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """NCCL's choice for one collective on one group, over all sizes."""

    op: NcclOp
    ranks: int
    domains: int
    nccl: str
    segments: tuple[ChoiceSegment, ...]
    """In the order of size; none for a group of one."""
    unavailable: tuple[UnavailableAlgorithm, ...]
    notes: tuple[str, ...] = ()


class NcclSizeExplanation(msgspec.Struct, frozen=True, kw_only=True):
    """NCCL's whole cost table for one size."""

    op: NcclOp
    ranks: int
    domains: int
    nccl: str
    nbytes: int
    candidates: tuple[AlgorithmCandidate, ...]
    """By NCCL's estimate, its choice first."""
    unavailable: tuple[UnavailableAlgorithm, ...]

    @property
    def choice_margin(self) -> ChoiceMargin:
        """Return NCCL's choice and its runner-up."""
        second = self.candidates[1] if len(self.candidates) > 1 else None
        return ChoiceMargin(nbytes=self.nbytes, winner=self.candidates[0], runner_up=second)

    @property
    def fastest(self) -> AlgorithmCandidate:
        """Return what we predict to be fastest; NCCL's order decides among equals."""
        return min(self.candidates, key=lambda candidate: candidate.predicted_us)


def explain_choice(
    place: Placement,
    op: NcclOp,
    *,
    nccl: str = DEFAULT_NCCL,
    collnet: bool = False,
    only: tuple[str, ...] | None = None,
) -> NcclExplanation:
    """Return what NCCL picks for a collective by size, and why.

    The arguments are those of `collective`: `collnet` enables reductions in the fabric's switches,
    `only` restricts the algorithms.
    """
    check_call(op, 0, only)
    segments: tuple[ChoiceSegment, ...] = ()
    missing: tuple[UnavailableAlgorithm, ...] = ()
    if place.ranks > 1 and op in ("all_to_all", "send_recv"):
        segments = _without_choice(place, op, nccl)
    elif place.ranks > 1:
        rules = build_algorithm_table(place, op, nccl, collnet, only)
        segments = _segments(rules, collnet, only)
        missing = list_unavailable(op, place, rules.entries, collnet=collnet, only=only)
    notes = []
    if collnet and place.domains > 1 and not place.links.has_in_network_fabric:
        notes.append("CollNet is on, but this fabric's switches are described without reductions.")
    return NcclExplanation(
        op=op,
        ranks=place.ranks,
        domains=place.domains,
        nccl=nccl,
        segments=segments,
        unavailable=missing,
        notes=tuple(notes),
    )


def explain_size(
    place: Placement,
    op: NcclOp,
    nbytes: int,
    *,
    nccl: str = DEFAULT_NCCL,
    collnet: bool = False,
    only: tuple[str, ...] | None = None,
) -> NcclSizeExplanation:
    """Return every algorithm and protocol with its cost for one size."""
    check_call(op, nbytes, only)
    problems = []
    if op in ("all_to_all", "send_recv"):
        what = f"{op} runs on send and receive kernels, which have no algorithms"
        problems.append(Problem("op", what, "ask collective() for its time"))
    if place.ranks == 1:
        problems.append(Problem("place", "a group of one sends nothing", "give two ranks or more"))
    if problems:
        raise InputError(problems)
    rules = build_algorithm_table(place, op, nccl, collnet, only)
    return NcclSizeExplanation(
        op=op,
        ranks=place.ranks,
        domains=place.domains,
        nccl=nccl,
        nbytes=nbytes,
        candidates=rules.list_candidates(nbytes),
        unavailable=list_unavailable(op, place, rules.entries, collnet=collnet, only=only),
    )


def _without_choice(place: Placement, op: NcclOp, nccl: str) -> tuple[ChoiceSegment, ...]:
    """Return the channels of send and receive kernels by size."""
    name = "pairwise" if op == "all_to_all" else "p2p"
    pieces = build_curve(place, op, nccl).segments
    runs = [next(run) for _, run in groupby(pieces, key=lambda piece: piece.channels)]
    starts = [ceil(piece.start_bytes) for piece in runs]
    return tuple(
        ChoiceSegment(
            start_bytes=start,
            end_bytes=None if following is None else following - 1,
            algorithm=name,
            protocol="",
            channels=(piece.channels, piece.channels),
        )
        for piece, start, following in zip(runs, starts, [*starts[1:], None], strict=True)
    )


def _segments(
    rules: AlgorithmTable, collnet: bool, only: tuple[str, ...] | None
) -> tuple[ChoiceSegment, ...]:
    """Join NCCL's choices by size where only a tree's factor changes."""
    found = list_nccl_choices(rules.placement, rules.op, rules.nccl, collnet, only)
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
            ChoiceSegment(
                start_bytes=start,
                end_bytes=end,
                algorithm=entry.algorithm,
                protocol=entry.protocol,
                channels=(
                    count_kernel_channels(entry, rules.placement, start, most),
                    count_kernel_channels(entry, rules.placement, last, most),
                ),
                margins=(_duel(rules, entry, start), _duel(rules, entry, last)),
                estimate=_anatomy(rules, entry, collnet),
            )
        )
    return tuple(segments)


def _duel(rules: AlgorithmTable, entry: TuningEntry, nbytes: int) -> ChoiceMargin:
    """Return the segment's own choice against the best of the others.

    Where two lines cross, rounding may put either first, so the winner is given.
    """
    own = (entry.algorithm, entry.protocol)
    others = [
        item for item in rules.list_candidates(nbytes) if (item.algorithm, item.protocol) != own
    ]
    winner = rules.get_candidate(entry, nbytes)
    return ChoiceMargin(nbytes=nbytes, winner=winner, runner_up=others[0] if others else None)


_CAPS: tuple[BandwidthCap, ...] = ("ll_max", "ring_ll128", "tree_ll128", "tree", "nvls_tree")
_NO_CAP = ((1e9,) * 3,) * 4


def _anatomy(rules: AlgorithmTable, entry: TuningEntry, collnet: bool) -> EstimateBreakdown:
    """Take an estimate apart; a cap holds where lifting it alone gives more bandwidth."""
    constants, place = get_release(rules.nccl), rules.placement
    holding: BandwidthCap = ""
    uncapped = entry.algbw_gbps
    for cap in _CAPS:
        lifted = msgspec.structs.replace(
            constants, caps=msgspec.structs.replace(constants.caps, **{cap: _NO_CAP})
        )
        freed = build_tuning_table(rules.op, place, rules.graphs, lifted, collnet=collnet)
        same = [e for e in freed if (e.algorithm, e.protocol) == (entry.algorithm, entry.protocol)]
        if same and same[0].algbw_gbps > uncapped * (1 + 1e-9):
            holding, uncapped = cap, same[0].algbw_gbps
    graph = rules.get_graph(entry)
    # NCCL multiplies channels by their speed inside a node up to two nodes, and between them above.
    speed = graph.intra_gbps if place.domains <= 2 else graph.inter_gbps
    return EstimateBreakdown(
        base_us=entry.base_us,
        intra_hops=entry.intra_hops,
        intra_hop_us=entry.intra_hop_us,
        inter_hops=entry.inter_hops,
        inter_hop_us=entry.inter_hop_us,
        gbps=entry.algbw_gbps,
        uncapped_gbps=uncapped,
        cap=holding,
        graph_channels=graph.channels,
        channel_gbps=speed,
    )
