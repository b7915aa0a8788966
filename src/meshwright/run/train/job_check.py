"""What keeps a job from running on one device, each with a fix. It knows no files."""

from collections.abc import Iterator

from meshwright.errors import InputError, Problem
from meshwright.run.train.optimizer.precision import state_formats
from meshwright.run.train.optimizer.settings import OptimizerSettings
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.layout.rules import largest_divisor
from meshwright.spec.model import Model
from meshwright.spec.workload import Training

_STAND_IN = "h100-superpod"
"""The cluster that a layout is held against; what is asked about the cluster itself is left out."""
_HOMES = {
    "recompute_ops": "layout.recompute_ops",
    "recompute_layers": "layout.recompute_layers",
    "sequence_length": "workload.sequence_length",
}


def problems_of(
    model: Model | None, layout: Layout | None, workload: Training | None
) -> list[Problem]:
    """Judge the parts of a job; None is a part that could not be read."""
    found = []
    if layout is not None:
        found += _alone(layout)
    if workload is not None and workload.adapter is not None:
        what = "training beside frozen weights is not done by this trainer"
        found.append(Problem("workload.adapter", what, "leave it out"))
    if layout is not None and workload is not None:
        found += _batch(layout, workload.global_batch)
        if model is not None:
            found += _fit(layout, model, workload)
    return found


def remarks_of(model: Model, workload: Training, optimizer: OptimizerSettings) -> Iterator[str]:
    """Say what of a job can run and is hardly meant."""
    warmup, steps = optimizer.warmup_steps, workload.steps
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


def _alone(layout: Layout) -> list[Problem]:
    found = []
    if layout.gpus > 1:
        what = f"asks for {layout.gpus} GPUs, and this trainer runs on one"
        found.append(Problem("layout", what, "set tp, cp, pp and dp to 1"))
    if layout.precision in {"mxfp8", "nvfp4"}:
        what = f"{layout.precision} needs tensor cores with block scaling (Blackwell)"
        found.append(Problem("layout.precision", what, "use fp8-blockwise or bf16"))
    else:
        try:
            state_formats(layout)
        except InputError as error:
            found += error.problems
    if layout.offload:
        found.append(Problem("layout.offload", "is not done by this trainer", "leave it out"))
    return found


def _batch(layout: Layout, batch: int) -> list[Problem]:
    found = []
    if batch % layout.microbatch:
        what = f"{layout.microbatch} does not divide the global batch of {batch}"
        fix = f"use {largest_divisor(batch, layout.microbatch)}"
        found.append(Problem("layout.microbatch", what, fix))
    if layout.global_batch not in {None, batch}:
        what = f"{layout.global_batch} is not the workload's {batch}"
        found.append(Problem("layout.global_batch", what, "leave it out"))
    return found


def _fit(layout: Layout, model: Model, workload: Training) -> list[Problem]:
    """Return what of the layout and the lengths the model does not have."""
    found = layout.check(model, catalog.cluster(_STAND_IN), workload)
    return [
        problem._replace(where=_HOMES[problem.where])
        for problem in found
        if problem.where in _HOMES
    ]
