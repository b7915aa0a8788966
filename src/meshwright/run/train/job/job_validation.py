"""What keeps a job from running, each with a fix. It knows no files and no machines."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Protocol

from meshwright.errors import InputError, Problem
from meshwright.run.parallel.compatibility import (
    find_layout_problems,
    find_unsupported_layout_options,
)
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig
from meshwright.run.train.optimizer.state_dtypes import get_state_dtypes
from meshwright.spec.layout import Layout
from meshwright.spec.layout.field_rules import largest_divisor
from meshwright.spec.model import Model
from meshwright.spec.workload import TrainingWorkload

_OF_WORKLOAD = {"sequence_length", "global_batch"}
"""What a layout is held against that stands in the workload."""


class AlgorithmEntry(Protocol):
    """An algorithm for an operation of a group."""

    @property
    def group(self) -> str:
        """Name of the group."""

    @property
    def operation(self) -> str:
        """Name of the operation."""

    @property
    def algorithm(self) -> str:
        """Name of the algorithm."""


def find_job_problems(
    model: Model | None,
    layout: Layout | None,
    workload: TrainingWorkload | None,
    algorithms: Sequence[AlgorithmEntry],
    *,
    capacity_factor: float | None = None,
) -> list[Problem]:
    """Judge the parts of a job; None is a part that could not be read."""
    found = []
    if capacity_factor is not None and model is not None and model.moe is None:
        what = f"{model.name} has no experts that could be full"
        found.append(Problem("moe.capacity_factor", what, "leave it out"))
    if layout is not None:
        found += _formats(layout)
    if workload is not None and workload.adapter is not None:
        what = "training beside frozen weights is not supported by the trainer"
        found.append(Problem("workload.adapter", what, "leave it out"))
    if layout is not None and workload is not None:
        found += _batch(layout, workload.global_batch)
        if model is not None:
            found += _fit(layout, model, workload)
    if layout is not None and algorithms:
        found += _chosen(layout, algorithms)
    return found


def iter_job_warnings(
    model: Model,
    workload: TrainingWorkload,
    optimizer: OptimizerConfig,
    *,
    capacity_factor: float | None = None,
) -> Iterator[str]:
    """Say what of a job can run and is hardly meant."""
    warmup, steps = optimizer.warmup_steps, workload.num_steps
    if warmup >= steps > 0:
        yield (
            f"optimizer.warmup_steps is {warmup:,} and the run has {steps:,} steps, so the "
            "learning rate only ever rises"
        )
    positions, length = model.max_positions, workload.sequence_length
    if positions and length > positions:
        yield (
            f"workload.sequence_length is {length:,} and model.max_positions {positions:,}, which "
            "an exported config.json will say"
        )
    if capacity_factor is not None and capacity_factor < 1:
        yield (
            f"moe.capacity_factor is {capacity_factor:g}: below 1 choices are dropped also "
            "where all experts get the same"
        )


def _formats(layout: Layout) -> list[Problem]:
    found = []
    if layout.precision in {"mxfp8", "nvfp4"}:
        what = f"{layout.precision} needs tensor cores with block scaling (Blackwell)"
        found.append(Problem("layout.precision", what, "use fp8-blockwise or bf16"))
    else:
        try:
            get_state_dtypes(layout)
        except InputError as error:
            found += error.problems
    return found + [_in_layout(problem) for problem in find_unsupported_layout_options(layout)]


def _batch(layout: Layout, batch: int) -> list[Problem]:
    found = []
    each = batch // layout.dp
    if batch % layout.dp:
        what = f"{layout.dp} does not divide the global batch of {batch}"
        found.append(Problem("layout.dp", what, f"use {largest_divisor(batch, layout.dp)}"))
    elif each % layout.microbatch:
        of = "the global batch of" if layout.dp == 1 else "a replica's share of the batch,"
        what = f"{layout.microbatch} does not divide {of} {each}"
        fix = f"use {largest_divisor(each, layout.microbatch)}"
        found.append(Problem("layout.microbatch", what, fix))
    if layout.global_batch not in {None, batch}:
        what = f"{layout.global_batch} is not the workload's {batch}"
        found.append(Problem("layout.global_batch", what, "leave it out"))
    return found


def _chosen(layout: Layout, algorithms: Sequence[AlgorithmEntry]) -> list[Problem]:
    """Return what of a choice of algorithms the groups of a layout cannot do."""
    if find_spec("torch") is None:  # as below
        return []
    from meshwright.run.parallel.mesh import list_algorithm_problems

    found, seen = [], set()
    for number, each in enumerate(algorithms):
        where = f"device.collective_algorithms[{number}]"
        if (each.group, each.operation) in seen:
            what = f"{each.operation} of {each.group} has an algorithm already"
            found.append(Problem(where, what, "leave one of them out"))
        seen.add((each.group, each.operation))
        one = {each.group: {each.operation: each.algorithm}}
        for problem in list_algorithm_problems(layout, one):
            field = "group" if problem.where == f"algorithms.{each.group}" else "algorithm"
            found.append(problem._replace(where=f"{where}.{field}"))
    return found


def _fit(layout: Layout, model: Model, workload: TrainingWorkload) -> list[Problem]:
    """Return what of the layout and the lengths the model does not have."""
    return [
        _in_layout(problem)
        for problem in find_layout_problems(model, layout, workload)
        # Judged already; of the batch a layout alone cannot say which part is at fault.
        if problem.where not in {"global_batch", "offload"}
    ]


def _in_layout(problem: Problem) -> Problem:
    """Say which table the field of a problem stands in."""
    part = "workload" if problem.where in _OF_WORKLOAD else "layout"
    return problem._replace(where=f"{part}.{problem.where}")
