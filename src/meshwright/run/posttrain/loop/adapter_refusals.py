"""What a run that trains an adapter does not go with, told before anything is trained.

Whoever reads settings needs no torch.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from meshwright.errors import Problem

if TYPE_CHECKING:
    from meshwright.run.posttrain.loop.settings import LoopSettings


def adapter_problems(settings: "LoopSettings") -> Iterator[Problem]:
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
    if workers.tp > 1:
        what = "an engine answers with an adapter on one device"
        yield Problem("workers.tp", what, "use 1 and more workers, or train every weight")
    if adapter.dora and settings.engine_weights != "model":
        what = f"the lengths of rows in {settings.engine_weights} are not those of the model"
        yield Problem("adapter.dora", what, "leave it out, or engine_weights")
    if settings.warm_up.steps and settings.model:
        what = "it would train the model's own weights, which the adapter leaves as they are"
        fix = "use 0, and begin with a model that mw train --recipe sft made"
        yield Problem("warm_up.steps", what, fix)
