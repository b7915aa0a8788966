"""Patterns of the optimizer's step."""

import re

import numpy as np

from meshwright.observe.analyze.nest import NONE
from meshwright.observe.findings.rank import Rank
from meshwright.observe.findings.registry import Hit, Pattern, of_rank
from meshwright.observe.findings.say import most_time, per_step, places, took

_STEP = re.compile(r"^Optimizer\.step#(\w+)\.step")
_FUSED = ("Adam", "AdamW", "SGD")
_FOREACH = ("ASGD", "Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
"""Optimizers of torch.optim whose updates take `fused=True`, and only `foreach=True`, on GPUs."""


def _instead(rank: Rank, *, apart: bool) -> str:
    """The setting, for the optimizer that the trace names; `apart` where it takes each tensor."""
    names = {match[1] for name in rank.part.strings("name").values if (match := _STEP.match(name))}
    if len(names) != 1:
        return ""
    (name,) = names
    if name in _FUSED:
        return f"torch.optim.{name}(params, fused=True)"
    if name in _FOREACH and apart:
        return f"torch.optim.{name}(params, foreach=True)"
    return f"torch.compile({name}.step)" + (", or torch._foreach_* inside it" if apart else "")


@of_rank(
    Pattern(
        name="unfused-optimizer",
        title="The optimizer updates tensor by tensor",
        family="optimizer",
        detected="50 or more elementwise kernels per step launched inside Optimizer.step, more "
        "than the multi-tensor kernels there",
        cost="estimated: two thirds of those kernels' time, of gaps below 30 µs before them and of "
        "late gaps that they end; AdamW tensor by tensor moves about three times the bytes of the "
        "fused one",
        remedy="torch.optim.AdamW(params, fused=True), torch.optim.SGD(params, fused=True); others "
        "of torch.optim with foreach=True",
    )
)
def unfused_optimizer(rank: Rank) -> Hit | None:
    """An elementwise kernel for each operation and tensor."""
    single = rank.tensor_by_tensor
    if not single.any():
        return None
    late = rank.claimed_ns("updating")
    spent = rank.alone_ns(single) + rank.short_gaps_ns(single)
    evidence = (
        f"{per_step(rank, single.sum())} elementwise kernels in Optimizer.step, {took(spent)} with "
        f"the gaps before them, and {took(late)} in which the host was late with them",
        *most_time(rank, single, 2),
    )
    return Hit(2 * (spent + late) / 3, evidence, places(rank, single), _instead(rank, apart=True))


@of_rank(
    Pattern(
        name="foreach-optimizer",
        title="The optimizer passes over its tensors several times",
        family="optimizer",
        detected="three or more kinds of multi-tensor kernels inside calls of Optimizer.step that "
        "launch no fused update",
        cost="estimated: half of their time; each kind reads and writes all tensors once, the "
        "fused update does so once in all",
        remedy="torch.optim.AdamW(params, fused=True), torch.optim.SGD(params, fused=True)",
    )
)
def foreach_optimizer(rank: Rank) -> Hit | None:
    """Multi-tensor kernels, one after another."""
    fused, step = rank.kernels("fused update"), rank.launching("updating")
    own = rank.kernels("foreach") & (step != NONE) & ~np.isin(step, step[fused])
    kinds = np.unique(rank.spans.name[own]).size
    if kinds < 3:
        return None
    spent = rank.alone_ns(own)
    evidence = (
        f"{per_step(rank, own.sum())} multi-tensor kernels of {kinds} kinds, {took(spent)}",
        *most_time(rank, own, 2),
    )
    return Hit(spent / 2, evidence, places(rank, own), _instead(rank, apart=False))
