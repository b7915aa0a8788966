"""How far a plan lies from what has been measured, in words.

A search looks everywhere, also where no measurement has kept the model honest. What is said here
does not widen a prediction's interval: that holds for setups like the published ones.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from meshwright.predict.plan.answer.measured_setups import (
    MeasuredSetup,
    MeasuredSetups,
    describe_setup,
    load_measured_setups,
)
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout
from meshwright.spec.layout.choices import AXES
from meshwright.spec.units import format_count

MIN_MEASURED_SETUPS = 5
"""Setups below which a choice counts as hardly measured."""
MAX_NEAR_DISTANCE = 3.0
"""Doublings, summed over degrees, GPUs and length, from which on the nearest run is far."""

_NUMBERS = {
    "gpus": "GPUs",
    "length": "tokens to a sequence",
    "parameters": "parameters",
    "tp": "tensor-parallel ranks",
    "cp": "context-parallel ranks",
    "pp": "pipeline stages",
    "ep": "expert-parallel ranks",
    "chunks": "chunks per pipeline rank",
    "microbatch": "sequences to a microbatch",
}
_DISTANCE = ("gpus", "length", "tp", "cp", "pp", "ep")
_KINDS = {"dense": "dense models", "experts": "models with experts", "scans": "models with scans"}


def list_extrapolations(work: JobSpec, known: MeasuredSetups | None = None) -> tuple[str, ...]:
    """Say how a plan lies outside what has been measured, the heaviest first."""
    setup, setups = describe_setup(work), (known or load_measured_setups()).setups
    return (
        *_choices(setup, setups),
        *_unsaid(work.layout),
        *_numbers(setup, setups),
        *_alone(setup, setups),
    )


class _Choice(NamedTuple):
    """Something that a plan has and a measured run may have."""

    said: str
    has: Callable[[MeasuredSetup], bool]


def _choices(own: MeasuredSetup, setups: tuple[MeasuredSetup, ...]) -> Iterator[str]:
    """Name what no measured run does, or hardly any; whole kinds before their combinations."""
    for choice in _made(own):
        count = sum(map(choice.has, setups))
        if count == 0:
            yield f"no measured run has {choice.said}"
        elif count < MIN_MEASURED_SETUPS:
            yield f"measured setups that have {choice.said}: {count}"


def _made(own: MeasuredSetup) -> Iterator[_Choice]:
    yield _Choice(f"GPUs of the kind {own.gpu}", lambda one: one.gpu == own.gpu)
    yield _Choice(
        f"{own.precision} GEMMs on {own.arch}",
        lambda one: (one.precision, one.arch) == (own.precision, own.arch),
    )
    if own.kind != "dense":
        yield _Choice(
            f"{_KINDS[own.kind]} on {own.arch}",
            lambda one: (one.kind, one.arch) == (own.kind, own.arch),
        )
    if own.adapter:
        yield _Choice("adapters beside frozen weights", lambda one: one.adapter)
    if own.schedule:
        yield _Choice(f"the schedule {own.schedule}", lambda one: one.schedule == own.schedule)
    if own.offload:
        yield _Choice(f"{own.offload} in host memory", lambda one: one.offload == own.offload)
    if own.hybrid:
        yield _Choice("states sharded within groups of replicas", lambda one: one.hybrid)
    if own.zero >= 0:
        piped = own.pp > 1
        yield _Choice(
            f"ZeRO {own.zero} {'beside' if piped else 'without'} a pipeline",
            lambda one: one.zero == own.zero and (one.pp > 1) == piped,
        )


def _unsaid(layout: Layout) -> Iterator[str]:
    """Name choices that published rows do not print, so that none can be said to be measured."""
    if layout.cp > 1 and layout.cp_kind != "ring":
        yield (
            f"measured runs do not say their kind of context parallelism; {layout.cp_kind} "
            "is predicted only"
        )
    used = [axis for axis in AXES if getattr(layout, axis) > 1]
    order = [axis for axis in layout.order.split("-") if axis in used]
    if order != used:
        yield (
            f"measured runs are taken to place axes in the order {'-'.join(used)}; "
            f"{'-'.join(order)} is predicted only"
        )


def _numbers(own: MeasuredSetup, setups: tuple[MeasuredSetup, ...]) -> Iterator[str]:
    """Name sizes beyond those of measured models of the same kind."""
    alike, kind = [one for one in setups if one.kind == own.kind], _KINDS[own.kind]
    for name, said in _NUMBERS.items():
        value, values = getattr(own, name), [getattr(one, name) for one in alike]
        shown = format_count if name == "parameters" else "{:,}".format
        if values and value > max(values):
            yield f"{shown(value)} {said}: measured {kind} end at {shown(max(values))}"
        elif values and value < min(values):
            yield f"{shown(value)} {said}: measured {kind} begin at {shown(min(values))}"


def find_nearest_setup(
    own: MeasuredSetup, setups: tuple[MeasuredSetup, ...]
) -> tuple[float, MeasuredSetup] | None:
    """Return the nearest setup on the same architecture and kind of model, and its distance.

    The distance is the sum over degrees, GPUs and length of doublings between the two.
    """
    alike = [one for one in setups if (one.arch, one.kind) == (own.arch, own.kind)]
    if not alike:
        return None
    best = min(alike, key=lambda one: _distance(own, one))
    return _distance(own, best), best


def _distance(own: MeasuredSetup, other: MeasuredSetup) -> float:
    return sum(abs(math.log2(getattr(own, name) / getattr(other, name))) for name in _DISTANCE)


def _alone(own: MeasuredSetup, setups: tuple[MeasuredSetup, ...]) -> Iterator[str]:
    """Say where the nearest measured run is, if that is far: sizes may be usual, not together."""
    found = find_nearest_setup(own, setups)
    if found is None or found[0] < MAX_NEAR_DISTANCE:
        return
    distance, other = found
    apart = ", ".join(
        f"{name} {getattr(other, name):,} instead of {getattr(own, name):,}"
        for name in _DISTANCE
        if getattr(other, name) != getattr(own, name)
    )
    yield f"the nearest measured run is {distance:.0f} doublings away: {apart}"
