"""What must hold between the fields of one layout, whatever the model and the cluster.

`list_layout_problems` is the slow, talkative twin of the fast test in `Layout.__post_init__`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from meshwright.errors import Problem
from meshwright.spec.layout.choices import (
    AXES,
    AXIS_ORDERS,
    BOOLEAN_FIELDS,
    CHOICES,
    MAX_VALUES,
    MULTI_CHUNK_SCHEDULES,
    OFFLOADS,
    RECOMPUTE_OPS,
    V_SCHEDULES,
)
from meshwright.spec.name_suggestions import find_closest_names
from meshwright.spec.serialization import format_value

if TYPE_CHECKING:
    from meshwright.spec.layout.layout import Layout

_OPTIONAL_DEGREES = frozenset({"shard", "expert_tp", "global_batch"})


def list_layout_problems(layout: "Layout") -> list[Problem]:
    """List everything that is wrong with the values of a layout, taken alone."""
    problems: list[Problem] = []
    for name, most in MAX_VALUES.items():
        value = getattr(layout, name)
        if value is None and name in _OPTIONAL_DEGREES:
            continue
        if type(value) is not int or not 1 <= value <= most:
            what = f"{format_value(value)} is not a whole number from 1 to {most:,}"
            fix = f"use {min(max(value, 1), most)}" if type(value) is int else "use 1"
            problems.append(Problem(name, what, fix))
    if layout.zero not in (0, 1, 2, 3) or type(layout.zero) is not int:
        what = f"{format_value(layout.zero)} is not one of 0, 1, 2, 3"
        problems.append(Problem("zero", what, "use 1"))
    for name, allowed in CHOICES.items():
        value = getattr(layout, name)
        if not isinstance(value, str) or value not in allowed:
            close = find_closest_names(value, allowed) if isinstance(value, str) else []
            known = sorted(allowed)
            fix = f"did you mean {close[0]}?" if close else f"use {known[0]}"
            what = f"{format_value(value)} is not one of {', '.join(known)}"
            problems.append(Problem(name, what, fix))
    order: object = layout.order
    if not isinstance(order, str) or order not in AXIS_ORDERS:
        what = f"{format_value(order)} does not name {', '.join(AXES)} once each"
        problems.append(Problem("order", what, "use tp-cp-ep-dp-pp"))
    problems += [
        Problem(
            name, f"{format_value(getattr(layout, name))} is neither true nor false", "use true"
        )
        for name in BOOLEAN_FIELDS
        if type(getattr(layout, name)) is not bool
    ]
    if problems:
        return problems  # the rules below compare values that must be sound by themselves
    for rule in _RULES:
        problems.extend(rule(layout))
    return problems


def _unknown_words(name: str, words: object, allowed: frozenset[str]) -> list[Problem]:
    if not isinstance(words, tuple):
        return [Problem(name, f"{format_value(words)} is not a list of words", "give a list")]
    known = ", ".join(sorted(allowed))
    return [
        Problem(name, f"{format_value(word)} is not one of them", f"use some of {known}")
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
    without, fix = "with recompute=none", "set recompute=full"
    return problems + _some_layers(
        layout, "recompute_layers", layout.recompute != "none", without, fix
    )


def _offload_rules(layout: "Layout") -> list[Problem]:
    problems = _unknown_words("offload", layout.offload, OFFLOADS)
    if problems:
        return problems
    without, fix = "where activations stay on the device", "add activations to offload"
    return _some_layers(layout, "offload_layers", "activations" in layout.offload, without, fix)


def _some_layers(layout: "Layout", name: str, meant: bool, without: str, fix: str) -> list[Problem]:
    """Say what is wrong with a number of layers per chunk."""
    layers = getattr(layout, name)
    if layers is not None and (type(layers) is not int or layers < 0):
        what = f"{format_value(layers)} is not a whole number from 0 up"
        return [Problem(name, what, "use 1, or leave it out")]
    if layers is not None and not meant:
        return [Problem(name, f"has no meaning {without}", fix)]
    return []


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
    elif chunks > 1 and schedule not in MULTI_CHUNK_SCHEDULES:
        problems.append(
            Problem(
                "schedule",
                f"{schedule} runs one chunk per rank, not virtual_stages={chunks}",
                "set schedule to interleaved, or virtual_stages to 1",
            )
        )
    if schedule == "interleaved" and layout.pp > 1 and chunks == 1:
        what = "interleaved runs several chunks per rank, not one"
        problems.append(Problem("virtual_stages", what, "set it to 2 or more, or schedule to 1f1b"))
    if schedule in V_SCHEDULES and layout.pp > 1 and chunks != 2:
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
    if layout.stage_layers is not None:
        problems += check_layer_split(layout.stage_layers, layout.chunks)
    return problems


def check_layer_split(split: object, chunks: int) -> list[Problem]:
    """Say what is wrong with a list of layers per chunk."""
    fix = f"give pp × virtual_stages = {chunks} numbers"
    if not isinstance(split, tuple) or any(type(n) is not int or n < 0 for n in split):
        return [
            Problem("stage_layers", f"{format_value(split)} is not a list of layer counts", fix)
        ]
    if len(split) != chunks:
        what = f"has {len(split)} numbers for {chunks} chunks"
        return [Problem("stage_layers", what, fix)]
    return []


def _data_rules(layout: "Layout") -> list[Problem]:
    problems = []
    if layout.sequence_parallel and layout.tp == 1:
        problems.append(
            Problem("sequence_parallel", "needs a tensor-parallel group", "set tp above 1")
        )
    spread = layout.dp * layout.cp
    if layout.shard is not None and spread % layout.shard:
        what = f"{layout.shard} does not divide dp × cp = {spread}"
        fix = f"use {largest_divisor(spread, layout.shard)}"
        problems.append(Problem("shard", what, fix))
    problems += _expert_rules(layout, layout.tp * spread)
    step = layout.dp * layout.microbatch
    if layout.global_batch is not None and layout.global_batch % step:
        what = f"{layout.global_batch} is not a multiple of dp × microbatch = {step}"
        fix = f"use {nearest_multiple(layout.global_batch, step)}"
        problems.append(Problem("global_batch", what, fix))
    return problems


def _expert_rules(layout: "Layout", dense: int) -> list[Problem]:
    sparse = layout.effective_expert_tp * layout.ep
    if dense % sparse == 0:
        return []
    what = f"expert_tp × ep = {sparse} does not divide tp × cp × dp = {dense}"
    if dense % layout.effective_expert_tp:
        fix = f"use expert_tp={largest_divisor(dense, layout.effective_expert_tp)}"
        return [Problem("expert_tp", what, fix)]
    fix = f"use ep={largest_divisor(dense // layout.effective_expert_tp, layout.ep)}"
    return [Problem("ep", what, fix)]


_RULES: tuple[Callable[["Layout"], list[Problem]], ...] = (
    _pipeline_rules,
    _recompute_rules,
    _data_rules,
    _offload_rules,
)


def largest_divisor(number: int, at_most: int) -> int:
    """Return the largest divisor of `number` that is not above `at_most`."""
    return next(d for d in range(min(number, at_most), 0, -1) if number % d == 0)


def nearest_multiple(number: int, step: int) -> int:
    """Return the multiple of `step` nearest to `number`, at least one step."""
    return max(1, round(number / step)) * step
