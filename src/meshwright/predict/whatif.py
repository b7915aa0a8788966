"""What if one thing were different: a work with one part of it changed, predicted anew.

A *thing* is a figure of the hardware (`nic`, `flops`), any field of a layout, or the size of the
work (`gpus`, `batch`). A value is written as itself (`100GB/s`, `8`, `zb-h1`) or against what there
is (`x2`, `/2`, `+10%`). A value that cannot be is kept with the reason.
"""

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.predict.cost import Calibration
from meshwright.predict.memory import MemoryPrediction, predict_memory
from meshwright.predict.price import dollars_per_trillion_tokens
from meshwright.predict.relayout import differences
from meshwright.predict.run import Run
from meshwright.predict.software import MEGATRON, Software
from meshwright.predict.step import StepPrediction, predict_step
from meshwright.predict.things import THINGS, Varied, thing_named
from meshwright.spec.work import Work


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One work with one thing changed: what it would take, or why it cannot be."""

    thing: str
    """What was changed; empty for the work as it stands."""
    value: str
    """Its value in words."""
    also: dict[str, Any] = {}
    """Fields of the layout that had to change with it."""
    step: StepPrediction | None = None
    """The predicted step; None where there is none."""
    memory: MemoryPrediction | None = None
    """The predicted memory."""
    dollars: float | None = None
    """For a trillion tokens; None where the cluster has no price."""
    problems: tuple[Problem, ...] = ()
    """Why it cannot be."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One thing and one of the values to try."""

    thing: str
    value: str


def read_asks(texts: Iterable[str]) -> tuple[Ask, ...]:
    """Read texts such as `nic=x2,x4`, or say everything that is wrong with them."""
    problems, asks = [], []
    for text in texts:
        name, equals, values = text.partition("=")
        wanted = [value.strip() for value in values.split(",") if value.strip()]
        if not equals or not wanted:
            what = f"{text!r} is not a thing with values"
            problems.append(Problem("", what, "write it like nic=x2,x4"))
            continue
        try:
            asks += [Ask(thing=thing_named(name.strip()), value=value) for value in wanted]
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return tuple(asks)


def what_if(
    work: Work,
    asks: Iterable[Ask],
    calibration: Calibration | None = None,
    software: Software = MEGATRON,
) -> tuple[Case, ...]:
    """Predict the work as it stands, then once for every thing changed by itself.

    A calibration holds as long as the device stays the one that was measured.
    """
    as_it_is = _case("", "as it is", Varied(work, ""), calibration, software)
    return (as_it_is, *(_tried(work, ask, calibration, software) for ask in asks))


def _tried(work: Work, ask: Ask, calibration: Calibration | None, software: Software) -> Case:
    try:
        varied = THINGS[ask.thing].apply(work, ask.value)
        problems = [found for found in varied.work.check() if found.where != "memory"]
    except InputError as error:
        return Case(thing=ask.thing, value=ask.value, problems=error.problems)
    relative = re.match(r"[x×*/+-]", ask.value) is not None and varied.value != ask.value
    value = f"{ask.value} ({varied.value})" if relative else varied.value
    if problems:
        return Case(thing=ask.thing, value=value, problems=tuple(problems))
    also = differences(work.layout, varied.work.layout)
    also.pop(ask.thing, None)
    case = _case(ask.thing, value, varied, calibration, software)
    return msgspec.structs.replace(case, also=also)


def _case(
    thing: str,
    value: str,
    varied: Varied,
    calibration: Calibration | None,
    software: Software,
) -> Case:
    if calibration is not None and calibration.gpu != varied.work.cluster.gpu.name:
        calibration = None
    run = Run(varied.work, calibration=calibration, software=software)
    step = predict_step(run)
    return Case(
        thing=thing,
        value=value,
        step=step,
        memory=predict_memory(run),
        dollars=dollars_per_trillion_tokens(varied.work, step.tokens_per_s),
    )
