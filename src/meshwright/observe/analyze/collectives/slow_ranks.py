"""What is slower on one rank than on the others: its kernels, or the links of its groups."""

from typing import NamedTuple

import numpy as np

from meshwright.observe.analyze.collectives.matched_collectives import MatchedCollectives
from meshwright.observe.analyze.spans.device_spans import find_device_spans
from meshwright.observe.analyze.spans.intervals import COMPUTE, Ints
from meshwright.timeline.timeline import Timeline

SLOW_LINK_RATIO = 1.25
"""A group whose transfers take so many times as long as those of its like has a slow link."""


class SlowLink(NamedTuple):
    """Ranks whose groups all transfer slower than like groups without them."""

    ranks: tuple[int, ...]
    slowdown: float


def measure_kernel_slowdowns(timeline: Timeline) -> dict[int, float]:
    """How many times as long each rank's kernels take as the same ones on the other ranks.

    Kernels are the same where they have one name; the others' figure is the median of their means.
    """
    known: dict[str, int] = {}
    ranks, means, counts = [], [], []
    for part in timeline.split_by_rank():
        spans = find_device_spans(part)
        spans = spans.take(spans.kind == COMPUTE)
        codes = np.array(
            [known.setdefault(name, len(known)) for name in spans.names], dtype=np.int64
        )
        if not spans.row.size:
            continue
        own = codes[spans.name]
        count = np.bincount(own, minlength=len(known))
        total = np.bincount(own, spans.end - spans.start, minlength=len(known))
        ranks.append(int(part.column("rank")[0]))
        counts.append(count)
        means.append(np.where(count > 0, total / np.maximum(count, 1), np.nan))
    size = len(known)
    table = np.array([np.append(one, np.full(size - one.size, np.nan)) for one in means])
    number = np.array([np.append(one, np.zeros(size - one.size)) for one in counts])
    found = {}
    for place, rank in enumerate(ranks):
        others = np.delete(table, place, axis=0)
        shared = np.flatnonzero((number[place] > 0) & (~np.isnan(others)).any(axis=0))
        if not shared.size:
            continue
        usual = float((number[place, shared] * _medians(others[:, shared])).sum())
        spent = float((number[place, shared] * table[place, shared]).sum())
        found[rank] = spent / usual if usual else 1.0
    return found


def _medians(table: Ints) -> Ints:
    """The median of each column without its NaNs; numpy's own imports masked arrays for that."""
    ordered = np.sort(table, axis=0)  # NaN comes last.
    count = (~np.isnan(table)).sum(axis=0)
    column = np.arange(table.shape[1])
    low, high = ordered[(count - 1) // 2, column], ordered[count // 2, column]
    middle: Ints = (low + high) / 2
    return middle


def find_slow_links(collectives: MatchedCollectives) -> tuple[SlowLink, ...]:
    """Find ranks all of whose groups transfer slower than groups of the same size elsewhere."""
    calls, transfer = collectives.calls, collectives.transfer_ns
    sizes = np.array([group.size for group in collectives.groups] or [0])[calls.group]
    keys = np.column_stack([calls.op, calls.bytes, calls.dtype, sizes])
    usable = calls.is_complete & (calls.bytes > 0)
    ratios: dict[int, list[float]] = {}
    if not usable.any():
        return ()
    _, like = np.unique(keys, axis=0, return_inverse=True)
    like = like.reshape(-1)
    for one in np.unique(like[usable]).tolist():
        own = usable & (like == one)
        groups = np.unique(calls.group[own])
        medians = np.array([np.median(transfer[own & (calls.group == g)]) for g in groups])
        if groups.size > 1:
            for group, median in zip(groups.tolist(), medians.tolist(), strict=True):
                ratios.setdefault(group, []).append(median / float(np.median(medians)))
    slow = {group: float(np.median(values)) for group, values in ratios.items()}
    suspects: dict[int, float] = {}
    for rank in {rank for group in slow for rank in collectives.groups[group].ranks}:
        own_ratios = [slow[g] for g in slow if rank in collectives.groups[g].ranks]
        if min(own_ratios) >= SLOW_LINK_RATIO:
            suspects[rank] = min(own_ratios)
    if not suspects:
        return ()
    worst = max(suspects.values())
    return (SlowLink(tuple(sorted(suspects)), worst),)
