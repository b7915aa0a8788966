"""Patterns of the optimizer's step."""

import re

import numpy as np

from meshwright.observe.analyze.spans.call_stacks import NO_SPAN
from meshwright.observe.findings.job.evidence_format import (
    format_per_step,
    format_top_kernels,
    select_longest_device_spans,
)
from meshwright.observe.findings.job.job_registry import detects_on_rank
from meshwright.observe.findings.job.rank_context import RankContext
from meshwright.observe.findings.pattern import Detection, Pattern
from meshwright.observe.findings.text_format import format_duration

_STEP = re.compile(r"^Optimizer\.step#(\w+)\.step")
_FUSED = ("Adam", "AdamW", "SGD")
_FOREACH = ("ASGD", "Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
"""Optimizers of torch.optim whose updates take `fused=True`, and only `foreach=True`, on GPUs."""


def _instead(rank: RankContext, *, apart: bool) -> str:
    """The setting, for the optimizer that the trace names; `apart` where it takes each tensor."""
    names = {
        match[1]
        for name in rank.rank_timeline.string_column("name").values
        if (match := _STEP.match(name))
    }
    if len(names) != 1:
        return ""
    (name,) = names
    if name in _FUSED:
        return f"torch.optim.{name}(params, fused=True)"
    if name in _FOREACH and apart:
        return f"torch.optim.{name}(params, foreach=True)"
    return f"torch.compile({name}.step)" + (", or torch._foreach_* inside it" if apart else "")


@detects_on_rank(
    Pattern(
        name="unfused-optimizer",
        title="The optimizer updates tensor by tensor",
        family="optimizer",
        rule="50 or more elementwise kernels per step launched inside Optimizer.step, more "
        "than the multi-tensor kernels there",
        cost_basis="estimated: two thirds of those kernels' time, of gaps below 30 µs before them "
        "and of "
        "late gaps that they end; AdamW tensor by tensor moves about three times the bytes of the "
        "fused one",
        remedy="torch.optim.AdamW(params, fused=True), torch.optim.SGD(params, fused=True); others "
        "of torch.optim with foreach=True",
    )
)
def detect_unfused_optimizer(rank: RankContext) -> Detection | None:
    """An elementwise kernel for each operation and tensor."""
    single = rank.unfused_optimizer_kernels
    if not single.any():
        return None
    late = rank.late_ns_by_cause("updating")
    spent = rank.measure_uncontended_ns(single) + rank.short_gaps_ns(single)
    evidence = (
        f"{format_per_step(rank, single.sum())} elementwise kernels in Optimizer.step, "
        f"{format_duration(spent)} with "
        f"the gaps before them, and {format_duration(late)} in which the host was late with them",
        *format_top_kernels(rank, single, 2),
    )
    return Detection(
        2 * (spent + late) / 3,
        evidence,
        select_longest_device_spans(rank, single),
        _instead(rank, apart=True),
    )


@detects_on_rank(
    Pattern(
        name="foreach-optimizer",
        title="Multi-tensor (foreach) optimizer: several passes over memory",
        family="optimizer",
        rule="three or more kinds of multi-tensor kernels inside calls of Optimizer.step that "
        "launch no fused update",
        cost_basis="estimated: half of their time; each kind reads and writes all tensors once, "
        "the "
        "fused update does so once in all",
        remedy="torch.optim.AdamW(params, fused=True), torch.optim.SGD(params, fused=True)",
    )
)
def detect_foreach_optimizer(rank: RankContext) -> Detection | None:
    """Multi-tensor kernels, one after another."""
    fused, step = rank.match_kernels("fused update"), rank.find_enclosing_launch_span("updating")
    own = rank.match_kernels("foreach") & (step != NO_SPAN) & ~np.isin(step, step[fused])
    kinds = np.unique(rank.spans.name[own]).size
    if kinds < 3:
        return None
    spent = rank.measure_uncontended_ns(own)
    evidence = (
        f"{format_per_step(rank, own.sum())} multi-tensor kernels of {kinds} kinds, "
        f"{format_duration(spent)}",
        *format_top_kernels(rank, own, 2),
    )
    return Detection(
        spent / 2, evidence, select_longest_device_spans(rank, own), _instead(rank, apart=False)
    )
