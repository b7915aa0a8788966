"""`AdapterSlot`: the adapter in training as an engine has it.

    slot = AdapterSlot(engine.runner, lora)
    slot.places()      where versions are written: PEFT's matrices, whole and in fp32
    slot.fill()        makes of them what the engine multiplies with

The engine keeps its own form of an adapter: scaled, turned, in its format and the order of its
rows, for DoRA with the growth of rows. It is made of the very numbers that the trainer has, and
rounded once, as the trainer rounds where it multiplies.
"""

import torch

from meshwright.errors import InputError, Problem
from meshwright.run.nn.placed import Placed
from meshwright.run.posttrain.adapters.adapter import (
    BEFORE,
    DecoderAdapter,
    modules_of,
    shapes_for,
)
from meshwright.run.posttrain.adapters.settings import Lora
from meshwright.run.posttrain.adapters.shards import MAGNITUDE, A, B
from meshwright.run.posttrain.weights.tensors import Place
from meshwright.run.serve.engine.runs import Runs
from meshwright.run.serve.model.peft_folder import LowRank, short_name


def of_adapter(adapter: DecoderAdapter) -> dict[str, Placed]:
    """Return what a trainer of one device has to send of an adapter."""
    return {name: Placed.all_of(each.detach()) for name, each in adapter.named_parameters()}


class AdapterSlot:
    """Where an adapter comes to in an engine of one device."""

    def __init__(self, runner: Runs, settings: Lora) -> None:
        """Take an engine's slot that all answers are written with."""
        if runner.adapters is None or runner.adapters.usual < 0:
            what = "it has no room for an adapter in training"
            raise InputError([Problem("engine", what, "start it with own_adapter")])
        self._adapters, self._settings = runner.adapters, settings
        shapes = shapes_for(modules_of(runner.forward.decoder), settings)
        self._tensors = {
            name: torch.zeros(shape, device=runner.cache.device) for name, shape in shapes.items()
        }

    def places(self) -> dict[str, Place]:
        """Return what versions are written to."""
        return {name: Place(Placed.all_of(each), ("fp32",)) for name, each in self._tensors.items()}

    def fill(self) -> None:
        """Let the engine answer with what has come; its own weights have to be there."""
        found = {}
        for name in [each for each in self._tensors if each.endswith(A)]:
            module = name.removeprefix(BEFORE).removesuffix(f".{A}")
            parts = (self._tensors.get(f"{BEFORE}{module}.{part}") for part in (A, B, MAGNITUDE))
            a, b, magnitude = parts
            assert a is not None
            assert b is not None
            scale = self._settings.scale_of(module)
            found[short_name(module)] = LowRank(a, b, scale, magnitude)
        self._adapters.write(self._adapters.usual, found)
