"""Rows of a tuner file: from what we predict, or from what was measured.

Every size from 0 on is covered, channels are always written out, and nodes and ranks are filled in,
so that nothing falls into the plugin's one-channel trap (`tuner_csv`). The last row of a collective
is Ring/Simple for all sizes: the plugin passes over a row whose algorithm NCCL cannot use, and
would otherwise leave such a call on one channel.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import isqrt
from statistics import median
from typing import NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.predict.network.explain.algorithm_table import (
    AlgorithmCandidate,
    AlgorithmTable,
    build_algorithm_table,
    check_call,
)
from meshwright.predict.network.nccl_constants import DEFAULT_NCCL, Algorithm, Protocol
from meshwright.predict.network.nccl_tuning import NcclOp
from meshwright.predict.network.placement import Placement
from meshwright.predict.network.tuner.tuner_csv import MAX_BYTES, TUNED_OPS, TunerRow
from meshwright.predict.network.tuner.tuning_sweep import CollectiveTiming

_LARGEST_PROBED = 1 << 36
_PROBES_PER_OCTAVE = 4


class _Pick(NamedTuple):
    algorithm: Algorithm
    protocol: Protocol
    channels: int


def build_predicted_rows(
    places: Sequence[Placement],
    ops: Sequence[NcclOp] = TUNED_OPS,
    *,
    nccl: str = DEFAULT_NCCL,
    collnet: bool = False,
    only: tuple[str, ...] | None = None,
    least_gain: float = 0.05,
) -> tuple[TunerRow, ...]:
    """Return rows that ask NCCL for what we predict to be fastest on each of these groups.

    A file should name every communicator of a job: one that no row fits runs on one channel. Where
    we predict less than `least_gain` (a share of the time) over NCCL's own choice, that stays.
    """
    problems = []
    for op in ops:
        check_call(op, 0, only)
        if op not in TUNED_OPS:
            what = f"NCCL asks no tuner about {op}"
            problems.append(Problem("ops", what, f"use some of {', '.join(TUNED_OPS)}"))
    if not 0 <= least_gain < 1:
        what = f"{least_gain!r} is not a share of time"
        problems.append(Problem("least_gain", what, "use 0 to below 1, such as 0.05"))
    if not places:
        problems.append(Problem("places", "there is no group", "give the groups of the job"))
    if any(place.ranks == 1 for place in places):
        problems.append(Problem("places", "a group of one sends nothing", "leave it out"))
    if problems:
        raise InputError(problems)
    shapes = {(place.domains, place.ranks): place for place in reversed(places)}
    rows: list[TunerRow] = []
    for place in reversed(shapes.values()):
        for op in ops:
            rules = build_algorithm_table(place, op, nccl, collnet, only)
            rows += _rows_of(op, place, _ranges(rules, least_gain), rules.ring_channels)
    return tuple(rows)


def build_measured_rows(sweep: Iterable[CollectiveTiming]) -> tuple[TunerRow, ...]:
    """Return rows that ask NCCL for what was measured to be fastest.

    Between two sizes that were measured the nearer one decides, by ratio; the smallest stands for
    all below it and the largest for all above. Repeated measurements count with their median.
    """
    groups: dict[tuple[object, ...], list[CollectiveTiming]] = {}
    for item in sweep:
        key = (item.op, item.nodes, item.ranks, item.pipe_ops, item.registered)
        groups.setdefault(key, []).append(item)
    if not groups:
        raise InputError([Problem("sweep", "there is no measurement", "give one for each size")])
    # Rows for some buffers or some numbers of joined calls come before those for all.
    ordered = sorted(groups.values(), key=lambda group: _generality(group[0]))
    rows: list[TunerRow] = []
    for group in ordered:
        sizes = sorted({item.nbytes for item in group})
        picks = [_fastest(group, size) for size in sizes]
        ends = [min(isqrt(max(low, 1) * high), high - 1) for low, high in pairwise(sizes)]
        first = group[0]
        rows += [
            TunerRow(
                op=first.op,
                min_bytes=start,
                max_bytes=end,
                algorithm=pick.algorithm,
                protocol=pick.protocol,
                channels=pick.channels,
                nodes=first.nodes,
                ranks=first.ranks,
                pipe_ops=first.pipe_ops,
                registered=first.registered,
            )
            for start, end, pick in _joined(picks, ends)
        ]
        rows.append(_last_resort(group))
    return tuple(rows)


def _generality(item: CollectiveTiming) -> tuple[int, int]:
    shape = (item.nodes is None) + (item.ranks is None)
    return shape, (item.pipe_ops is None) + (item.registered is None)


def _last_resort(group: Sequence[CollectiveTiming]) -> TunerRow:
    first = group[0]
    rings = [item.channels for item in group if item.algorithm == "ring"]
    return TunerRow(
        op=first.op,
        min_bytes=0,
        max_bytes=MAX_BYTES,
        algorithm="ring",
        protocol="simple",
        channels=max(rings or [item.channels for item in group]),
        nodes=first.nodes,
        ranks=first.ranks,
        pipe_ops=first.pipe_ops,
        registered=first.registered,
    )


def _fastest(group: Sequence[CollectiveTiming], size: int) -> _Pick:
    times: dict[_Pick, list[float]] = {}
    for item in group:
        if item.nbytes == size:
            pick = _Pick(item.algorithm, item.protocol, item.channels)
            times.setdefault(pick, []).append(item.seconds)
    return min(times, key=lambda pick: median(times[pick]))


def _joined(picks: Sequence[_Pick], ends: Sequence[int]) -> list[tuple[int, int, _Pick]]:
    """Return ranges from 0 to the largest size, neighbours of one pick as one."""
    ranges: list[tuple[int, int, _Pick]] = []
    start = 0
    for pick, end in zip(picks, [*ends, MAX_BYTES], strict=True):
        if ranges and ranges[-1][2] == pick:
            ranges[-1] = (ranges[-1][0], end, pick)
        elif end >= start:
            ranges.append((start, end, pick))
        start = end + 1
    return ranges


def _rows_of(
    op: NcclOp, place: Placement, ranges: Sequence[tuple[int, int, _Pick]], ring_channels: int
) -> list[TunerRow]:
    last = (0, MAX_BYTES, _Pick("ring", "simple", ring_channels))
    return [
        TunerRow(
            op=op,
            min_bytes=start,
            max_bytes=end,
            algorithm=pick.algorithm,
            protocol=pick.protocol,
            channels=pick.channels,
            nodes=place.domains,
            ranks=place.ranks,
        )
        for start, end, pick in (*ranges, last)
    ]


def _ranges(rules: AlgorithmTable, least_gain: float) -> list[tuple[int, int, _Pick]]:
    """Probe sizes in steps of a quarter octave, and find each change between two by halving."""
    pick = _picker(rules, least_gain)
    sizes = {0, *(int(2 ** (step / _PROBES_PER_OCTAVE)) for step in range(_steps() + 1))}
    picks: list[_Pick] = []
    ends: list[int] = []
    for low, high in pairwise(sorted(sizes)):
        picks.append(pick(low))
        ends.append(high - 1 if pick(low) == pick(high) else _last_equal(pick, low, high))
    picks.append(pick(_LARGEST_PROBED))
    return _joined(picks, ends)


def _steps() -> int:
    return _PROBES_PER_OCTAVE * (_LARGEST_PROBED.bit_length() - 1)


def _last_equal(pick: Callable[[int], _Pick], low: int, high: int) -> int:
    """Return the last size from `low` up that has its pick, where `high` has another."""
    wanted = pick(low)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if pick(middle) == wanted else (low, middle)
    return low


def _picker(rules: AlgorithmTable, least_gain: float) -> Callable[[int], _Pick]:
    """Return what to ask for at a size, kept once computed."""
    known: dict[int, _Pick] = {}
    most = {(entry.algorithm, entry.protocol): rules.max_channels(entry) for entry in rules.entries}

    def pick(nbytes: int) -> _Pick:
        if nbytes not in known:
            items = rules.list_candidates(nbytes)
            best = min(items, key=_by_prediction)
            gains = best.predicted_us <= items[0].predicted_us * (1 - least_gain)
            taken = best if gains else items[0]
            name: Algorithm = taken.algorithm
            protocol: Protocol = taken.protocol
            known[nbytes] = _Pick(name, protocol, _steady(taken.channels, most[name, protocol]))
        return known[nbytes]

    return pick


def _by_prediction(candidate: AlgorithmCandidate) -> float:
    return candidate.predicted_us


def _steady(channels: int, most: int) -> int:
    """Round down to a power of two below the full number.

    NCCL grows channels one by one with the size; the plugin walks all rows on every call, so a
    row for each number would cost more than it gives.
    """
    return channels if channels >= most else 1 << (channels.bit_length() - 1)
