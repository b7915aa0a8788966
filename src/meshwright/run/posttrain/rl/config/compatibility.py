"""What a run that trains an adapter does not go with, told before anything is trained.

Whoever reads settings needs no torch.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.errors import Problem
from meshwright.run.parallel.compatibility import (
    find_layout_problems,
    find_unsupported_layout_options,
)
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model

if TYPE_CHECKING:
    from meshwright.run.posttrain.rl.config.rl_config import RLConfig


def find_adapter_problems(settings: "RLConfig") -> Iterator[Problem]:
    """Yield what stands against the adapter of a run; nothing where there is none."""
    adapter, workers = settings.adapter, settings.workers
    if adapter is None:
        return
    if adapter.dropout:
        what = "the engine drew with all inputs, and the trainer would leave some out"
        yield Problem("adapter.dropout", what, "use 0")
    if settings.layout.gpus > 1:
        what = "an adapter is trained on one device here"
        yield Problem("layout", what, "set its degrees to 1, or train every weight")
    if workers.tensor_parallel_size > 1:
        what = "an engine answers with an adapter on one device"
        yield Problem(
            "workers.tensor_parallel_size", what, "use 1 and more workers, or train every weight"
        )
    if adapter.dora and settings.engine_weights != "none":
        what = f"the lengths of rows in {settings.engine_weights} are not those of the model"
        yield Problem("adapter.dora", what, "leave it out, or engine_weights")
    if settings.warm_up.steps and settings.model:
        what = "it would train the model's own weights, which the adapter leaves as they are"
        fix = "use 0, and begin with a model that mw train --recipe sft made"
        yield Problem("warm_up.steps", what, fix)


_USUAL = Layout()


def find_rl_layout_problems(settings: "RLConfig") -> Iterator[Problem]:
    """Yield what of a layout the settings say otherwise, or do not go with."""
    layout = settings.layout
    if layout.precision not in (_USUAL.precision, settings.precision):
        what = f"{layout.precision} is not the run's precision"
        yield Problem(
            "layout.precision", what, "leave it out: precision of the run is fp32 or bf16"
        )
    for name in ("microbatch", "global_batch"):
        if getattr(layout, name) != getattr(_USUAL, name):
            what = "answers of unlike length are no rows of a batch"
            yield Problem(f"layout.{name}", what, "leave it out: microbatch_tokens cuts a step")
    if layout.optimizer == "muon":
        what = "reinforcement learning trains by adamw and its like, not by Muon"
        yield Problem("layout.optimizer", what, "use adamw")
    yield from (
        each._replace(where=f"layout.{each.where}")
        for each in find_unsupported_layout_options(layout)
    )
    if layout.gpus > 1:
        yield from _rank_problems(settings)


def _rank_problems(settings: "RLConfig") -> Iterator[Problem]:
    if settings.placement == "colocated":
        what = "an engine shares its memory with one device of a trainer, not with several"
        yield Problem("placement", what, "use disaggregated, or one device")
    if settings.rollout_only:
        what = "nothing is trained, so ranks have nothing to share"
        yield Problem("rollout_only", what, "draw with one device: set the layout's degrees to 1")
    kind, _, number = settings.device.partition(":")
    if number:
        what = f"every rank has a device of its own, and {settings.device} is one"
        yield Problem("device", what, f"use {kind}")


def find_model_problems(model: Model, layout: Layout) -> list[Problem]:
    """Return what keeps the ranks of a layout from training a model."""
    if layout.gpus == 1:
        return []
    return [
        each._replace(where=f"layout.{each.where}")
        for each in find_layout_problems(model, layout, None)
    ]
