"""Patterns of the optimizer's step."""

import numpy as np

from meshwright.observe.analyze.nest import NONE
from meshwright.observe.analyze.spans import Flags
from meshwright.observe.findings.rank import Rank
from meshwright.observe.findings.registry import Hit, Pattern, of_rank
from meshwright.observe.findings.say import most_time, per_step, places, took

MANY_KERNELS = 50


def _phase_ns(rank: Rank, own: Flags) -> int:
    """Time of these kernels and of the gaps before them."""
    length = rank.gaps.end - rank.gaps.start
    before = int(length[own[rank.ending]].sum()) if length.size else 0
    return int(rank.length[own].sum()) + before


@of_rank(
    Pattern(
        name="unfused-optimizer",
        title="The optimizer updates tensor by tensor",
        family="optimizer",
        detected="50 or more elementwise kernels per step launched inside Optimizer.step, more "
        "than the multi-tensor kernels there",
        cost="estimated: two thirds of those kernels' time and of the gaps before them; AdamW "
        "tensor by tensor moves about three times the bytes of the fused one",
        remedy="torch.optim.AdamW(params, fused=True) (or foreach=True)",
    )
)
def unfused_optimizer(rank: Rank) -> Hit | None:
    """An elementwise kernel for each operation and tensor."""
    inside = rank.launched_in("updating")
    single = inside & rank.kernels("elementwise") & ~rank.kernels("foreach", "fused update")
    many = inside & rank.kernels("foreach", "fused update")
    if single.sum() / (rank.num_steps or 1.0) < MANY_KERNELS or single.sum() <= many.sum():
        return None
    spent = _phase_ns(rank, single)
    evidence = (
        f"{per_step(rank, single.sum())} elementwise kernels in Optimizer.step, {took(spent)} with "
        f"the gaps before them; {int(many.sum())} multi-tensor kernels",
        *most_time(rank, single, 2),
    )
    return Hit(2 * spent / 3, evidence, places(rank, single))


@of_rank(
    Pattern(
        name="foreach-optimizer",
        title="The optimizer passes over its tensors several times",
        family="optimizer",
        detected="three or more kinds of multi-tensor kernels inside calls of Optimizer.step that "
        "launch no fused update",
        cost="estimated: half of their time; each kind reads and writes all tensors once, the "
        "fused update does so once in all",
        remedy="torch.optim.AdamW(params, fused=True)",
    )
)
def foreach_optimizer(rank: Rank) -> Hit | None:
    """Multi-tensor kernels, one after another."""
    fused, step = rank.kernels("fused update"), rank.launching("updating")
    own = rank.kernels("foreach") & (step != NONE) & ~np.isin(step, step[fused])
    kinds = np.unique(rank.spans.name[own]).size
    if kinds < 3:
        return None
    spent = _phase_ns(rank, own)
    evidence = (
        f"{per_step(rank, own.sum())} multi-tensor kernels of {kinds} kinds, {took(spent)}",
        *most_time(rank, own, 2),
    )
    return Hit(spent / 2, evidence, places(rank, own))
