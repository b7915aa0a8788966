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
from meshwright.run.nn.sharding.sharded_tensor import ShardedTensor
from meshwright.run.posttrain.lora.adapter_sharding import MAGNITUDE, A, B
from meshwright.run.posttrain.lora.decoder_adapter import (
    PEFT_PREFIX,
    DecoderAdapter,
    compute_adapter_shapes,
    find_adaptable_modules,
)
from meshwright.run.posttrain.lora.lora_config import LoRAConfig
from meshwright.run.posttrain.weight_sync.weight_tensors import WeightTarget
from meshwright.run.serve.engine.executor.executor import Executor
from meshwright.run.serve.model.peft_checkpoint import LoRALayerWeights, strip_module_prefix


def collect_adapter_weights(adapter: DecoderAdapter) -> dict[str, ShardedTensor]:
    """Return what a trainer of one device has to send of an adapter."""
    return {
        name: ShardedTensor.unsharded(each.detach()) for name, each in adapter.named_parameters()
    }


class AdapterSlot:
    """Where an adapter comes to in an engine of one device."""

    def __init__(self, runner: Executor, settings: LoRAConfig) -> None:
        """Take an engine's slot that all answers are written with."""
        if runner.lora_manager is None or runner.lora_manager.default_slot < 0:
            what = "it has no room for an adapter in training"
            raise InputError([Problem("engine", what, "start it with trained_lora_slot")])
        self._adapters, self._settings = runner.lora_manager, settings
        shapes = compute_adapter_shapes(find_adaptable_modules(runner.model.decoder), settings)
        self._tensors = {
            name: torch.zeros(shape, device=runner.kv_cache.device)
            for name, shape in shapes.items()
        }

    def collect_weight_targets(self) -> dict[str, WeightTarget]:
        """Return what versions are written to."""
        return {
            name: WeightTarget(ShardedTensor.unsharded(each), ("fp32",))
            for name, each in self._tensors.items()
        }

    def activate(self) -> None:
        """Let the engine answer with what has come; its own weights have to be there."""
        found = {}
        for name in [each for each in self._tensors if each.endswith(A)]:
            module = name.removeprefix(PEFT_PREFIX).removesuffix(f".{A}")
            parts = (
                self._tensors.get(f"{PEFT_PREFIX}{module}.{part}") for part in (A, B, MAGNITUDE)
            )
            a, b, magnitude = parts
            assert a is not None
            assert b is not None
            scale = self._settings.scale_of(module)
            found[strip_module_prefix(module)] = LoRALayerWeights(a, b, scale, magnitude)
        self._adapters.write_slot(self._adapters.default_slot, found)
