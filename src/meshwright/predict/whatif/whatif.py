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
from meshwright.predict.memory.memory_prediction import MemoryPrediction, predict_memory
from meshwright.predict.price import dollars_per_trillion_tokens
from meshwright.predict.step.step_prediction import StepPrediction, predict_step
from meshwright.predict.training_run.training_framework import MEGATRON, TrainingFramework
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.predict.whatif.whatif_parameters import (
    WHATIF_PARAMETERS,
    ChangedJob,
    find_parameter,
)
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout.layout_changes import list_changed_fields


class WhatIfCase(msgspec.Struct, frozen=True, kw_only=True):
    """One work with one thing changed: what it would take, or why it cannot be."""

    parameter: str
    """What was changed; empty for the work as it stands."""
    value: str
    """Its value in words."""
    dependent_changes: dict[str, Any] = {}
    """Fields of the layout that had to change with it."""
    step: StepPrediction | None = None
    """The predicted step; None where there is none."""
    memory: MemoryPrediction | None = None
    """The predicted memory."""
    dollars: float | None = None
    """For a trillion tokens; None where the cluster has no price."""
    problems: tuple[Problem, ...] = ()
    """Why it cannot be."""


class WhatIfChange(msgspec.Struct, frozen=True, kw_only=True):
    """One thing and one of the values to try."""

    parameter: str
    value: str


def read_changes(texts: Iterable[str]) -> tuple[WhatIfChange, ...]:
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
            asks += [
                WhatIfChange(parameter=find_parameter(name.strip()), value=value)
                for value in wanted
            ]
        except InputError as error:
            problems += error.problems
    if problems:
        raise InputError(problems)
    return tuple(asks)


def what_if(
    work: JobSpec,
    asks: Iterable[WhatIfChange],
    calibration: Calibration | None = None,
    software: TrainingFramework = MEGATRON,
) -> tuple[WhatIfCase, ...]:
    """Predict the work as it stands, then once for every thing changed by itself.

    A calibration holds as long as the device stays the one that was measured.
    """
    as_it_is = _case("", "as it is", ChangedJob(work, ""), calibration, software)
    return (as_it_is, *(_tried(work, ask, calibration, software) for ask in asks))


def _tried(
    work: JobSpec, ask: WhatIfChange, calibration: Calibration | None, software: TrainingFramework
) -> WhatIfCase:
    try:
        varied = WHATIF_PARAMETERS[ask.parameter].apply(work, ask.value)
        problems = [found for found in varied.job.check() if found.where != "memory"]
    except InputError as error:
        return WhatIfCase(parameter=ask.parameter, value=ask.value, problems=error.problems)
    relative = re.match(r"[x×*/+-]", ask.value) is not None and varied.value != ask.value
    value = f"{ask.value} ({varied.value})" if relative else varied.value
    if problems:
        return WhatIfCase(parameter=ask.parameter, value=value, problems=tuple(problems))
    also = list_changed_fields(work.layout, varied.job.layout)
    also.pop(ask.parameter, None)
    case = _case(ask.parameter, value, varied, calibration, software)
    return msgspec.structs.replace(case, dependent_changes=also)


def _case(
    thing: str,
    value: str,
    varied: ChangedJob,
    calibration: Calibration | None,
    software: TrainingFramework,
) -> WhatIfCase:
    if calibration is not None and calibration.gpu != varied.job.cluster.gpu.name:
        calibration = None
    run = TrainingRun(varied.job, calibration=calibration, framework=software)
    step = predict_step(run)
    return WhatIfCase(
        parameter=thing,
        value=value,
        step=step,
        memory=predict_memory(run),
        dollars=dollars_per_trillion_tokens(varied.job, step.tokens_per_s),
    )
