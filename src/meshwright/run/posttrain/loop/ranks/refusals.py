"""Which settings a trainer's layout does not go with, told before anything is trained.

Whoever reads settings needs no torch.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.errors import Problem
from meshwright.run.parallel.fit import lacking, misfits
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model

if TYPE_CHECKING:
    from meshwright.run.posttrain.loop.settings import LoopSettings

_USUAL = Layout()


def layout_problems(settings: "LoopSettings") -> Iterator[Problem]:
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
    yield from (each._replace(where=f"layout.{each.where}") for each in lacking(layout))
    if layout.gpus > 1:
        yield from _rank_problems(settings)


def _rank_problems(settings: "LoopSettings") -> Iterator[Problem]:
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


def model_problems(model: Model, layout: Layout) -> list[Problem]:
    """Return what keeps the ranks of a layout from training a model."""
    if layout.gpus == 1:
        return []
    return [each._replace(where=f"layout.{each.where}") for each in misfits(model, layout, None)]
