"""`LoRASpec`: small matrices trained beside frozen ones (LoRA). It knows no layout and no software.

A matrix W of `fan_out` × `fan_in` gets B × A beside it, `fan_out` × rank by rank × `fan_in`
(Hu et al. 2021, arXiv 2106.09685). Only A and B are trained.
"""

from typing import Literal, get_args

import msgspec

from meshwright.spec.field_checks import FieldChecker
from meshwright.spec.model import Model, count_flops
from meshwright.spec.model.weights import Weight

LoRATarget = Literal["qkv", "out", "up", "down", "experts"]


class LoRASpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which matrices carry adapters, and of which rank; all else is frozen.

    By default every linear layer of attention and MLP carries one, as with PEFT's all-linear.
    Routed experts do only where they are named; routers, embeddings, the head and vision towers
    never.
    """

    rank: int
    """Rank of the adapters (LoRA)."""
    targets: tuple[LoRATarget, ...] = ("qkv", "out", "up", "down")
    """Matrices that carry them: `qkv` and `out` of attention (or what stands in its place), `up`
    (with the gate) and `down` of MLPs and shared experts, those of routed `experts`."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(rank=self.rank)
        bounds.mark_unreadable(targets=self.targets)
        if bounds.is_valid("targets"):
            for index, target in enumerate(self.targets):
                bounds.one_of(f"targets[{index}]", target, get_args(LoRATarget))
            if not self.targets:
                bounds.add("targets", "names no matrix", "name one, such as qkv")
            elif len(set(self.targets)) < len(self.targets):
                bounds.add("targets", "names a matrix twice", "name each once")
        bounds.raise_problems()

    def is_target(self, weight: Weight) -> bool:
        """Return whether a matrix carries an adapter."""
        return get_lora_target(weight) in self.targets


def get_lora_target(weight: Weight) -> LoRATarget | None:
    """Return the word for a matrix among the targets of adapters; routers have none."""
    match weight.part:
        case "router":
            return None
        case "expert":
            return "experts"
        case "mixer":
            return "out" if weight.name in ("o", "out") else "qkv"
    # The shared products into and out of a smaller width stand around the experts as up and down.
    return "down" if weight.name in ("down", "shared_down", "latent_up") else "up"


def training_flops(model: Model, length: int, adapter: LoRASpec | None) -> float:
    """Count the FLOPs of training on one token: with an adapter, no gradients of frozen weights.

    Counted exactly, as `count_flops` does. Every adapted matrix counts a pair of its own.
    """
    whole = count_flops(model, length)
    if adapter is None:
        return whole.total
    heads = model.multi_token
    layers = [
        *model.count_layers_by_block(),
        *([(model.block(heads.block), heads.depth)] if heads else []),
    ]
    core = added = 0.0
    for block, count in layers:
        core += count * block.core_flops(length)
        for weight in filter(adapter.is_target, block.list_weights(model.hidden)):
            added += count * 2 * weight.active * adapter.rank * (weight.fan_in + weight.fan_out)
    # Forward and input gradients; what lies between the mixer's matrices has two inputs.
    return 2 * whole.forward + core + 3 * added
