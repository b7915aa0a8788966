"""Patterns of a host that waits for the device: every wait empties the queue of launches."""

import numpy as np

from meshwright.observe.analyze.spans import Flags
from meshwright.observe.findings.rank import Rank
from meshwright.observe.findings.registry import Hit, Pattern, of_rank
from meshwright.observe.findings.say import longest, names_of, per_step, short, took


def _hit(rank: Rank, own: Flags, what: str) -> Hit | None:
    waits = rank.waits
    if not own.any():
        return None
    rows = np.unique(waits.row[own])
    evidence = [
        f"{what}: {per_step(rank, rows.size)} ({names_of(rank, rows, 1)}) empty the queue, device "
        f"idle {took(waits.cost_ns[own].sum())}"
    ]
    worst = int(waits.row[own][np.argmax(waits.cost_ns[own])])
    names = rank.part.strings("name")
    around = [int(level[0]) for level in rank.operators_around(np.array([worst]))]
    stack = [names.values[code] for code in around if code >= 0]
    python = _frames(rank, worst)
    if stack or python:
        evidence.append("the costliest in " + " > ".join(map(short, (python or stack)[-3:])))
    return Hit(
        int(waits.cost_ns[own].sum()),
        tuple(evidence),
        longest(waits.gap_start[own], waits.gap_end[own]),
    )


def _frames(rank: Rank, row: int) -> list[str]:
    """The Python functions around a call, outermost first; those of PyTorch's own are left out."""
    rows = rank.category("python_function")
    rows = rows[rank.thread[rows] == rank.thread[row]]
    around = rows[(rank.start[rows] <= rank.start[row]) & (rank.end[rows] >= rank.end[row])]
    names = rank.part.strings("name")
    found = [names.values[code] for code in names.codes[around[np.argsort(rank.start[around])]]]
    return [name for name in found if not name.startswith(("torch/", "<built-in", "nn.Module"))]


def _inside(rank: Rank, sort: str) -> Flags:
    outer = rank.host_rows(sort)
    rows = rank.waits.row
    if not outer.size or not rows.size:
        return np.zeros(rows.size, dtype=np.bool_)
    return rank.within(rows, outer)


@of_rank(
    Pattern(
        name="item-sync",
        title=".item() waits for the device",
        family="waiting",
        detected="a synchronising call inside aten::item or aten::_local_scalar_dense during which "
        "the device runs dry",
        cost="measured: the idle gaps that begin in those calls, to the next kernel",
        remedy="log every N steps, keep the value on the device (loss.detach()) and read it with "
        '.to("cpu", non_blocking=True) one step later; no .item(), float(), or if on tensors in '
        "the loop",
    )
)
def item_sync(rank: Rank) -> Hit | None:
    """Values that are read in the loop."""
    return _hit(rank, _inside(rank, "reading"), ".item() or its like")


@of_rank(
    Pattern(
        name="nonzero-sync",
        title="An operator whose shape depends on data waits for the device",
        family="waiting",
        detected="a synchronising call inside aten::nonzero, masked_select, unique or "
        "repeat_interleave during which the device runs dry",
        cost="measured: the idle gaps that begin in those calls",
        remedy="use torch.where(mask, a, b) or multiply by the mask instead of boolean indexing; "
        "repeat_interleave(..., output_size=n); torch.nonzero_static(x, size=n)",
    )
)
def nonzero_sync(rank: Rank) -> Hit | None:
    """Shapes that the host has to know."""
    own = _inside(rank, "counting") & ~_inside(rank, "reading")
    return _hit(rank, own, "operators of unknown shape")


@of_rank(
    Pattern(
        name="blocking-copy",
        title="A copy between host and device waits for the device",
        family="waiting",
        detected="a synchronising call inside aten::to or aten::copy_ during which the device runs "
        "dry",
        cost="measured: the idle gaps that begin in those calls",
        remedy='x.to("cuda", non_blocking=True) from pinned memory (DataLoader(pin_memory=True)); '
        'to the host: .to("cpu", non_blocking=True) into pinned memory, and wait on an event later',
    )
)
def blocking_copy(rank: Rank) -> Hit | None:
    """Copies that wait."""
    own = _inside(rank, "moving") & ~_inside(rank, "reading") & ~_inside(rank, "counting")
    return _hit(rank, own, "copies")


@of_rank(
    Pattern(
        name="explicit-synchronise",
        title="The loop synchronises by itself",
        family="waiting",
        detected="cudaDeviceSynchronize, cudaStreamSynchronize or cudaEventSynchronize outside "
        "operators during which the device runs dry",
        cost="measured: the idle gaps that begin in those calls",
        remedy="remove torch.cuda.synchronize() from the loop; time with torch.cuda.Event("
        "enable_timing=True) and read the events a step later",
    )
)
def explicit_synchronise(rank: Rank) -> Hit | None:
    """Calls of torch.cuda.synchronize()."""
    named = _inside(rank, "moving") | _inside(rank, "reading") | _inside(rank, "counting")
    named |= _inside(rank, "allocating") | _inside(rank, "barring")
    return _hit(rank, ~named, "calls outside operators")
