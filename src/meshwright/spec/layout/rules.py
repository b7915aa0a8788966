"""What must hold between the fields of one layout, whatever the model and the cluster.

`explain` is the slow, talkative twin of the fast test in `Layout.__post_init__`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from meshwright.errors import Problem
from meshwright.spec.layout.kinds import (
    ALLOWED,
    AXES,
    CHUNKED_SCHEDULES,
    FOLDED_SCHEDULES,
    MOST,
    OFFLOADS,
    ORDERS,
    RECOMPUTE_OPS,
)
from meshwright.spec.names import nearest
from meshwright.spec.read import shown

if TYPE_CHECKING:
    from meshwright.spec.layout.layout import Layout

_OPTIONAL_DEGREES = frozenset({"shard", "expert_tp", "global_batch"})


def explain(layout: "Layout") -> list[Problem]:
    """List everything that is wrong with the values of a layout, taken alone."""
    problems: list[Problem] = []
    for name, most in MOST.items():
        value = getattr(layout, name)
        if value is None and name in _OPTIONAL_DEGREES:
            continue
        if type(value) is not int or not 1 <= value <= most:
            what = f"{shown(value)} is not a whole number from 1 to {most:,}"
            fix = f"use {min(max(value, 1), most)}" if type(value) is int else "use 1"
            problems.append(Problem(name, what, fix))
    if layout.zero not in (0, 1, 2, 3) or type(layout.zero) is not int:
        problems.append(Problem("zero", f"{layout.zero!r} is not one of 0, 1, 2, 3"))
    for name, allowed in ALLOWED.items():
        value = getattr(layout, name)
        if not isinstance(value, str) or value not in allowed:
            close = nearest(value, allowed) if isinstance(value, str) else []
            fix = f"did you mean {close[0]}?" if close else ""
            known = ", ".join(sorted(allowed))
            problems.append(Problem(name, f"{value!r} is not one of {known}", fix))
    if layout.order not in ORDERS:
        problems.append(
            Problem("order", f"{layout.order!r} does not name {', '.join(AXES)} once each",
                    "tp-cp-ep-dp-pp")
        )  # fmt: skip
    if problems:
        return problems  # the rules below compare values that must be sound by themselves
    for rule in _RULES:
        problems.extend(rule(layout))
    return problems


def _unknown_words(name: str, words: object, allowed: frozenset[str]) -> list[Problem]:
    if not isinstance(words, tuple):
        return [Problem(name, f"{words!r} is not a list of words")]
    known = ", ".join(sorted(allowed))
    return [
        Problem(name, f"{word!r} is not one of {known}")
        for word in words
        if not isinstance(word, str) or word not in allowed
    ]


def _recompute_rules(layout: "Layout") -> list[Problem]:
    problems = _unknown_words("recompute_ops", layout.recompute_ops, RECOMPUTE_OPS)
    if layout.recompute_ops and layout.recompute != "selective":
        problems.append(
            Problem(
                "recompute_ops",
                f"has no meaning with recompute={layout.recompute}",
                "set recompute to selective or leave recompute_ops out",
            )
        )
    layers = layout.recompute_layers
    if layers is not None and (type(layers) is not int or layers < 0):
        problems.append(Problem("recompute_layers", f"{layers!r} is not a whole number"))
    elif layers is not None and layout.recompute == "none":
        problems.append(
            Problem("recompute_layers", "has no meaning with recompute=none", "set recompute=full")
        )
    return problems


def _pipeline_rules(layout: "Layout") -> list[Problem]:
    problems = []
    schedule, chunks = layout.schedule, layout.virtual_stages
    if chunks > 1 and layout.pp == 1:
        problems.append(
            Problem(
                "virtual_stages",
                f"{chunks} chunks per rank need a pipeline",
                "set pp above 1, or virtual_stages to 1",
            )
        )
    elif chunks > 1 and schedule not in CHUNKED_SCHEDULES:
        problems.append(
            Problem(
                "schedule",
                f"{schedule} runs one chunk per rank, not virtual_stages={chunks}",
                "set schedule to interleaved, or virtual_stages to 1",
            )
        )
    if schedule in FOLDED_SCHEDULES and layout.pp > 1 and chunks != 2:
        problems.append(
            Problem(
                "virtual_stages",
                f"{chunks} does not fit {schedule}",
                f"{schedule} runs two chunks per rank: set virtual_stages=2",
            )
        )
    if schedule == "dualpipe" and layout.pp > 1 and layout.pp % 2:
        problems.append(
            Problem("pp", f"{layout.pp} is odd, dualpipe pairs ranks", f"use pp={layout.pp + 1}")
        )
    split = layout.stage_layers
    if split is not None:
        given: object = split
        if not isinstance(given, tuple) or any(type(n) is not int or n < 0 for n in given):
            problems.append(Problem("stage_layers", f"{split!r} is not a list of layer counts"))
        elif len(split) != layout.chunks:
            problems.append(
                Problem(
                    "stage_layers",
                    f"has {len(split)} numbers for {layout.chunks} chunks",
                    f"give pp × virtual_stages = {layout.chunks} numbers",
                )
            )
    return problems


def _data_rules(layout: "Layout") -> list[Problem]:
    problems = []
    if layout.sequence_parallel and layout.tp == 1:
        problems.append(
            Problem("sequence_parallel", "needs a tensor-parallel group", "set tp above 1")
        )
    spread = layout.dp * layout.cp
    if layout.shard is not None and spread % layout.shard:
        problems.append(
            Problem("shard", f"{layout.shard} does not divide dp × cp = {spread}",
                    f"use {largest_divisor(spread, layout.shard)}")
        )  # fmt: skip
    dense = layout.tp * spread
    sparse = layout.experts_tp * layout.ep
    if layout.ep > 1 and dense % sparse:
        problems.append(
            Problem("ep", f"expert_tp × ep = {sparse} does not divide tp × cp × dp = {dense}",
                    f"use ep={largest_divisor(max(1, dense // layout.experts_tp), layout.ep)}")
        )  # fmt: skip
    batch = layout.global_batch
    if batch is not None and batch % (layout.dp * layout.microbatch):
        step = layout.dp * layout.microbatch
        problems.append(
            Problem("global_batch", f"{batch} is not a multiple of dp × microbatch = {step}",
                    f"use {max(1, round(batch / step)) * step}")
        )  # fmt: skip
    return problems + _unknown_words("offload", layout.offload, OFFLOADS)


_RULES: tuple[Callable[["Layout"], list[Problem]], ...] = (
    _pipeline_rules,
    _recompute_rules,
    _data_rules,
)


def largest_divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of `number` that is not above `at_most`."""
    return next(d for d in range(min(number, at_most), 0, -1) if number % d == 0)
