"""Why no layout of a question fits, by how much the nearest one misses, and what would help.

The cause comes first: the rule that refuses the last candidates, or the memory that the nearest
layout lacks. What would help is found by trying: one constraint after the other is lifted, and only
what then holds a layout that fits is said.
"""

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from math import ceil, log
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwright.errors import InputError, Problem
from meshwright.predict.plan.answer.nearest_layout import (
    NearestLayout,
    find_nearest_layout,
    find_simplest_layout,
)
from meshwright.predict.plan.answer.violated_rule import find_last_violation
from meshwright.predict.plan.question.layout_space import FIXED_UNLESS_ALLOWED, LayoutSpace
from meshwright.predict.plan.question.plan_question import OFFLOADS, PlanQuestion
from meshwright.predict.plan.space.degree_splits import list_divisors
from meshwright.spec.layout import Layout
from meshwright.spec.layout.field_rules import nearest_multiple
from meshwright.spec.units import format_bytes

_PROBLEMS = 5
"""The most that is said at once."""
_TRIES, _FEW = 300, 60
"""Splits of the GPUs tried for the cause, and for each thing that might help."""
_CLOSE = 6
"""Values near the one given that are tried before any that fits is named."""
_DOUBLINGS = 7
"""How often the GPUs are doubled."""
_LIFTED = (
    "recompute", "recompute_ops", "recompute_layers", "cp", "microbatch", "zero", "tp", "pp", "ep",
    "expert_tp", "dp", "offload", "offload_layers", "sequence_parallel", "shard", "cp_kind",
    "schedule", "virtual_stages", "stage_layers", "order",
)  # fmt: skip
"""Fields that decide whether a layout fits, in the order they are opened."""
_RISING = ("recompute", "zero", "offload", "sequence_parallel")
"""Words that stand in the order of how much they save."""
_SHORTEST = 1024
"""Sequences are not halved below so many tokens."""
_DEGREES = ("tp", "cp", "pp", "dp", "microbatch", "ep", "expert_tp")
_TOLD = (
    "tp", "cp", "pp", "dp", "ep", "expert_tp", "microbatch", "virtual_stages", "zero", "shard",
    "recompute", "recompute_layers", "offload", "offload_layers",
)  # fmt: skip
"""Fields that say what makes a layout small."""


class FeasibleChange(NamedTuple):
    """One thing that would make a layout fit."""

    field: str
    explanation: str
    change: str
    """The change, in as few words as it takes."""

    def problem(self) -> Problem:
        """Return it as one of the problems of an error."""
        left_out = self.change.removeprefix("no ")
        plain = left_out == self.change
        fix = f"use {self.change}" if plain else f"leave {left_out} out"
        return Problem(self.field, self.explanation, fix)


def explain_infeasible(question: PlanQuestion) -> InputError:
    """Return an error that says which constraint kills the last candidates, and by how much."""
    refused = find_last_violation(question)
    closest = find_nearest_layout(question, tries=_TRIES) if refused is None else None
    if closest is not None and closest.fits:
        # A search that stopped early or left something out gives no reason to blame the question.
        what = f"the search kept no layout, though {_shown(question, closest)} is predicted to fit"
        fix = "let it run to its end, or fix these fields"
        return InputError([Problem("layout", what, fix)])
    helps = tuple(islice(_helps(question, refused, closest), _PROBLEMS - 1))
    changes = " or ".join(dict.fromkeys(one.change for one in helps[:3]))
    tried = f"try {changes}" if changes else ""
    if refused is not None:
        cause = refused if not tried else refused._replace(fix=tried)
    else:
        cause = Problem("memory", _misses(question, closest), tried)
    return InputError([cause, *(one.problem() for one in helps)])


def _misses(question: PlanQuestion, closest: NearestLayout | None) -> str:
    model, gpus = question.model.name, f"{question.gpus:,} GPUs"
    if closest is None:
        return f"no layout of {model} was found on {gpus}"
    stage = f" on stage {closest.stage}" if closest.layout.pp > 1 else ""
    return (
        f"no layout of {model} fits on {gpus}: the nearest, {_named(closest.layout)}, needs "
        f"{format_bytes(closest.needed_bytes)}{stage} of {format_bytes(closest.capacity_bytes)}, "
        f"{format_bytes(closest.missing_bytes)} too much"
    )


def _named(layout: Layout) -> str:
    """Name what makes a layout small, all that is as usual left out."""
    usual = Layout()
    words = [
        _set(name, value)
        for name in _TOLD
        if (value := getattr(layout, name)) != getattr(usual, name)
        and not (name == "expert_tp" and value == layout.tp)
    ]
    return " ".join(words) or "everything on one GPU"


def _set(name: str, value: object) -> str:
    if isinstance(value, tuple):
        value = "+".join(map(str, value)) or "none"
    if isinstance(value, bool):
        value = "on" if value else "off"
    return f"{name}={value}"


def _fits(question: PlanQuestion) -> NearestLayout | None:
    """Return a layout that fits, if one is found soon."""
    found = find_nearest_layout(question, tries=_FEW)
    return found if found is not None and found.fits else None


def _shown(question: PlanQuestion, found: NearestLayout) -> str:
    """Name a layout that fits, one that people would run if there is one."""
    return _named(find_simplest_layout(question, found, tries=_FEW).layout)


def _helps(
    question: PlanQuestion, refused: Problem | None, closest: NearestLayout | None
) -> Iterator[FeasibleChange]:
    """Yield what would help, each tried: the question's own limits first, then more of all."""
    own = [_less_strict(question, closest), _opened(question)]
    if refused is not None and refused.where == "global_batch":
        own.append(_batches(question))
    yielded = False
    for some in own:
        for one in some:
            yielded = True
            yield one
    more = () if yielded else _together(question)
    for one in chain(more, _larger(question), _shorter(question)):
        yielded = True
        yield one
    free = _in(question, _without(question.space, _LIFTED))
    if not yielded and free != question:
        # Neither the fields alone nor more GPUs alone: only both.
        yield from _larger(free)


def _less_strict(question: PlanQuestion, closest: NearestLayout | None) -> Iterator[FeasibleChange]:
    """Lift what is asked of memory and of nodes."""
    space, whole = question.space, question.cluster.gpu.memory_bytes
    if closest is not None and space.max_memory < 1:
        share = ceil(closest.needed_bytes / whole * 100) / 100
        if share <= 1:
            eased = find_nearest_layout(
                _in(question, replace(space, max_memory=share)), tries=_TRIES
            )
            if eased is not None and eased.fits:
                what = (
                    f"{space.max_memory:g} of {format_bytes(whole)} may be used, and "
                    f"{_named(closest.layout)} needs {format_bytes(closest.needed_bytes)}"
                )
                yield FeasibleChange("max_memory", what, f"max_memory={share:g}")
    if space.fit_scale_up_domain:
        free = _in(question, replace(space, fit_scale_up_domain=False))
        found = _fits(free)
        if found is not None:
            what = "tensor, context and expert parallel groups have to stay inside a node; "
            what += f"{_shown(free, found)} fits and leaves it"
            yield FeasibleChange("fit_scale_up_domain", what, "no fit_scale_up_domain")


def _opened(question: PlanQuestion) -> Iterator[FeasibleChange]:
    """Open one field after the other, and name the value nearest to the given ones that fits."""
    space = question.space
    for name in _LIFTED:
        if name not in space.fixed and name not in FIXED_UNLESS_ALLOWED:
            continue
        found = _fits(_in(question, _wider(space, name)))
        if found is None:
            continue
        values = [*islice(_near(question, name), _CLOSE), getattr(found.layout, name)]
        for value in values:
            nearer = _in(question, replace(space, fixed={**space.fixed, name: (value,)}))
            closer = _fits(nearer)
            if closer is not None:
                allowed = space.get_allowed(name) or ()
                given = " or ".join(_set(name, one) for one in allowed[:4])
                what = f"{given or 'nothing'} is all that is allowed; "
                what += f"{_shown(nearer, closer)} fits"
                change = f"no {name}" if value is None else _set(name, value)
                yield FeasibleChange(name, what, change)
                break


def _wider(space: LayoutSpace, name: str) -> LayoutSpace:
    """Return a space in which a field may take any value."""
    if name == "offload":
        return replace(space, fixed={**space.fixed, name: OFFLOADS})
    return _without(space, (name,))


def _near(question: PlanQuestion, name: str) -> Iterator[Any]:
    """Yield values of a field that were not given, those nearest to the given ones first."""
    given = question.space.get_allowed(name) or ()
    if name in _DEGREES:
        whole = question.workload.global_batch if name == "microbatch" else question.gpus
        apart = {
            value: min((abs(log(value / one)) for one in given if one), default=0.0)
            for value in list_divisors(whole)
            if value not in given
        }
        yield from sorted(apart, key=lambda value: (apart[value], -value))
    elif name in _RISING:
        every = _wider(LayoutSpace(), name).get_allowed(name) or ()
        yield from (value for value in every if value not in given)


def _together(question: PlanQuestion) -> Iterator[FeasibleChange]:
    """Open groups of fields where none alone is enough: the degrees, then all."""
    space = question.space
    for names in (_DEGREES, _LIFTED):
        some = [name for name in names if name in space.fixed]
        free = _in(question, _without(space, some))
        found = _fits(free) if len(some) > 1 else None
        if found is not None:
            shown = find_simplest_layout(free, found, tries=_FEW).layout
            values = {name: getattr(shown, name) for name in some}
            changed = [
                f"no {name}" if value is None else _set(name, value)
                for name, value in values.items()
                if value not in space.fixed[name]
            ]
            what = f"no single one of {', '.join(some)} is the cause; {_named(shown)} fits"
            yield FeasibleChange(", ".join(some), what, " with ".join(changed))
            return


def _batches(question: PlanQuestion) -> Iterator[FeasibleChange]:
    """Change the batch until it divides."""
    batch = question.workload.global_batch
    every = {nearest_multiple(batch, step) for step in list_divisors(question.gpus)} - {batch}
    for other in sorted(every, key=lambda one: abs(one - batch))[:_CLOSE]:
        changed = _trained(question, global_batch=other)
        found = _fits(changed)
        if found is not None:
            what = f"with {other:,} sequences a step, {_shown(changed, found)} fits"
            yield FeasibleChange("global_batch", what, f"global_batch={other}")
            return


def _larger(question: PlanQuestion) -> Iterator[FeasibleChange]:
    """Double the GPUs until a layout fits."""
    for doubled in range(1, _DOUBLINGS + 1):
        gpus = question.gpus << doubled
        try:
            larger = replace(question, cluster=question.cluster.with_gpus(gpus))
        except InputError:
            return  # the cluster cannot be that large
        found = _fits(larger)
        if found is not None:
            what = f"{_shown(larger, found)} fits on {gpus:,} GPUs"
            yield FeasibleChange("gpus", what, f"gpus={gpus}")
            return


def _shorter(question: PlanQuestion) -> Iterator[FeasibleChange]:
    """Halve the sequences until a layout fits."""
    length = question.workload.sequence_length
    while length % 2 == 0 and length > _SHORTEST:
        length //= 2
        shorter = _trained(question, sequence_length=length)
        found = _fits(shorter)
        if found is not None:
            what = f"{_shown(shorter, found)} fits with sequences of {length:,} tokens"
            yield FeasibleChange("sequence_length", what, f"sequence_length={length}")
            return


def _without(space: LayoutSpace, names: Iterable[str]) -> LayoutSpace:
    fixed = {name: values for name, values in space.fixed.items() if name not in names}
    return replace(space, fixed=fixed)


def _in(question: PlanQuestion, space: LayoutSpace) -> PlanQuestion:
    return replace(question, space=space)


def _trained(question: PlanQuestion, **changes: int) -> PlanQuestion:
    return replace(question, workload=replace(question.workload, **changes))
