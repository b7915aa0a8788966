"""Patterns of a host that waits for the device: every wait drains the launch queue.

A wait costs the gap that begins in it, and those after it that a host further ahead would not have
had (`RankContext.gaps_after_waits`): launches are late there because the host waited, not because
it is slow.
"""

from collections.abc import Callable

import numpy as np

from meshwright.observe.analyze.spans.intervals import Flags, Ints
from meshwright.observe.findings.job.evidence_format import (
    format_per_step,
    format_top_names,
    select_longest_spans,
)
from meshwright.observe.findings.job.job_registry import detects_on_rank
from meshwright.observe.findings.job.rank_context import RankContext
from meshwright.observe.findings.pattern import Detection, Pattern
from meshwright.observe.findings.text_format import format_duration, truncate_name

_COST = (
    "measured: the idle gaps that begin in those calls, to the next kernel; of gaps that had begun "
    "before, the part in those calls; and later ones with no other cause, until the host has made "
    "up for the time it waited"
)


def _register_wait_pattern(
    name: str,
    title: str,
    *,
    what: str,
    calls: Callable[[RankContext, Ints], Flags],
    detected: str,
    remedy: str,
    serving: str = "",
) -> None:
    """A pattern of the waits that `calls` tells: of rows of waiting calls, which are its own."""
    rule = f"{detected} the device runs dry or has nothing to do"

    @detects_on_rank(
        Pattern(name, title, "synchronization", rule, _COST, remedy, serving_remedy=serving)
    )
    def detector(rank: RankContext) -> Detection | None:
        first, after = rank.host_waits, rank.gaps_after_waits
        own, later = calls(rank, first.row), calls(rank, after.row)
        if not own.any():
            return None
        rows = np.unique(first.row[own])
        direct, lasting = int(first.cost_ns[own].sum()), int(after.cost_ns[later].sum())
        evidence = [
            f"{what}: {format_per_step(rank, rows.size)} ({format_top_names(rank, rows, 1)}) drain "
            f"the launch queue; device idle {format_duration(direct)}"
        ]
        if lasting:
            evidence.append(
                f"and {format_duration(lasting)} in {int(later.sum())} gaps after "
                f"them, until the launch queue is full again"
            )
        evidence += _stack(rank, int(first.row[own][np.argmax(first.cost_ns[own])]))
        start = np.concatenate([first.gap_start[own], after.gap_start[later]])
        end = np.concatenate([first.gap_end[own], after.gap_end[later]])
        return Detection(direct + lasting, tuple(evidence), select_longest_spans(start, end))


def _stack(rank: RankContext, row: int) -> list[str]:
    """The Python functions around a call, less PyTorch's own; or the operators."""
    rows = rank.match_categories("python_function")
    rows = rows[rank.thread_id[rows] == rank.thread_id[row]]
    around = rows[(rank.start[rows] <= rank.start[row]) & (rank.end[rows] >= rank.end[row])]
    names = rank.rank_timeline.string_column("name")
    found = [names.values[code] for code in names.codes[around[np.argsort(rank.start[around])]]]
    stack = [name for name in found if not name.startswith(("torch/", "<built-in", "nn.Module"))]
    if not stack:
        levels = (int(level[0]) for level in rank.find_operators_around(np.array([row])))
        stack = [names.values[code] for code in levels if code >= 0]
    return ["the costliest in " + " > ".join(map(truncate_name, stack[-3:]))] if stack else []


def _inside(rank: RankContext, rows: Ints, *sorts: str) -> Flags:
    """Which of the rows are inside host spans of one of these sorts of `names`."""
    found = np.zeros(rows.size, dtype=np.bool_)
    for sort in sorts:
        outer = rank.host_rows(sort)
        if outer.size and rows.size:
            found |= rank.match_rows_within(rows, outer)
    return found


_register_wait_pattern(
    "item-sync",
    ".item() waits for the device",
    what=".item() or its like",
    calls=lambda rank, rows: _inside(rank, rows, "reading"),
    detected="a synchronizing call inside aten::item or aten::_local_scalar_dense during which",
    remedy="log every N steps, keep the value on the device (loss.detach()) and read it with "
    '.to("cpu", non_blocking=True) one step later; no .item(), float(), or if on tensors in the '
    "loop",
    serving='keep the value on the device and read it with .to("cpu", non_blocking=True) one step '
    "later; no .item(), float(), or if on tensors in the loop",
)
_register_wait_pattern(
    "nonzero-sync",
    "An operator whose shape depends on data waits for the device",
    what="operators of unknown shape",
    calls=lambda rank, rows: _inside(rank, rows, "counting") & ~_inside(rank, rows, "reading"),
    detected="a synchronizing call inside aten::nonzero, masked_select, unique or "
    "repeat_interleave during which",
    remedy="use torch.where(mask, a, b) or multiply by the mask instead of boolean indexing; "
    "repeat_interleave(..., output_size=n); torch.nonzero_static(x, size=n)",
)
_register_wait_pattern(
    "blocking-copy",
    "A copy between host and device waits for the device",
    what="copies",
    calls=lambda rank, rows: (
        _inside(rank, rows, "moving") & ~_inside(rank, rows, "reading", "counting")
    ),
    detected="a synchronizing call inside aten::to or aten::copy_ during which",
    remedy='x.to("cuda", non_blocking=True) from pinned memory (DataLoader(pin_memory=True)); '
    'to the host: .to("cpu", non_blocking=True) into pinned memory, and wait on an event later',
)
_register_wait_pattern(
    "explicit-synchronize",
    "The loop synchronizes by itself",
    what="calls outside operators",
    calls=lambda rank, rows: (
        ~_inside(rank, rows, "moving", "reading", "counting", "allocating", "barring")
    ),
    detected="cudaDeviceSynchronize, cudaStreamSynchronize or cudaEventSynchronize outside "
    "operators during which",
    remedy="remove torch.cuda.synchronize() from the loop; time with torch.cuda.Event("
    "enable_timing=True) and read the events a step later",
)
