"""`DecoderAdapter`: the trainable part of a decoder whose own weights are frozen.

adapter = attach_adapter(decoder, LoRAConfig(rank=16, alpha=32))
optimizer = torch.optim.AdamW(adapter.parameters())

The adapter's parameters have PEFT's names. They stand beside the decoder, not in it: what loads,
saves or shards the decoder sees the model that it always was.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import InputError, Problem
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.linear.linear import Linear
from meshwright.run.nn.sharding.shard_spec import ShardSpec
from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.run.posttrain.lora.adapted_linear import (
    AdaptedLinear,
    AdaptedModule,
    LoRAPair,
    WeightSharding,
    map_fused_rows,
)
from meshwright.run.posttrain.lora.adapter_sharding import MAGNITUDE, A, B, build_pair_shards
from meshwright.run.posttrain.lora.lora_config import LoRAConfig
from meshwright.run.serve.model.lora import PackedModule, list_packed_modules
from meshwright.spec.model import Model
from meshwright.spec.workload.lora import LoRASpec, LoRATarget

_RENAMED = {"backbone.": "model."}
"""Beginnings of names that transformers changes as it opens a checkpoint (Nemotron-H)."""

LoRAPairs = Mapping[str, LoRAPair]

PEFT_PREFIX = "base_model.model."
"""What PEFT's names have before those of the model's modules."""


class DecoderAdapter(nn.Module):
    """Low-rank additions to a decoder's linear layers, as one module of their own.

    Its modes `train()` and `eval()` say whether inputs are dropped.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: LoRAConfig,
        lora_pairs: LoRAPairs,
        sharded_model: ShardedModel | None = None,
    ) -> None:
        """Put pairs, by the whole names of the modules, beside a decoder, which is frozen.

        Where several ranks share the model, `sharded_model` says how, and pairs are what this one
        has.
        """
        super().__init__()
        self.config, self.lora_pairs = config, dict(lora_pairs)
        """The pairs by the names of their modules."""
        self.adaptable_modules = find_adaptable_modules(
            decoder if sharded_model is None else build_decoder(decoder.model)
        )
        """All modules that could be adapted, also those on other ranks."""
        # Beside the modules of this one: the decoder's parameters are not the adapter's.
        self._beside = (decoder, _layers(decoder, lora_pairs, sharded_model))
        self._merged = False
        self._reversible = False
        decoder.requires_grad_(False)
        for name, pair in lora_pairs.items():
            _put(self, f"{PEFT_PREFIX}{name}", pair)
        for layer in self.layers.values():
            layer.attach()

    @property
    def decoder(self) -> Decoder:
        """The decoder that is adapted."""
        return self._beside[0]

    @property
    def layers(self) -> dict[str, AdaptedLinear]:
        """The adapted layers by the names they have in the decoder."""
        return self._beside[1]

    def merge(self, *, keep: bool = True) -> None:
        """Put the adapter into the decoder's weights, which then do without it.

        `keep` holds a copy of the weights for `unmerge`: sums of floating-point numbers cannot be
        taken back exactly by subtraction.
        """
        self._want_merged(False)
        for layer in self.layers.values():
            layer.merge(keep=keep)
        self._merged, self._reversible = True, keep

    def unmerge(self) -> None:
        """Give the decoder its weights back, bit by bit, with the adapter beside them."""
        self._want_merged(True)
        if not self._reversible:
            what = "the weights before the merge were not kept"
            raise InputError([Problem("unmerge", what, "merge with keep=True, or load them again")])
        for layer in self.layers.values():
            layer.unmerge()
        self._merged = False

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Let the decoder answer as the frozen model, such as the reference of a KL penalty."""
        self._want_merged(False)
        for layer in self.layers.values():
            layer.detach()
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.attach()

    def remove(self) -> None:
        """Take the adapter away; the decoder's weights stay as they are, frozen."""
        for layer in self.layers.values():
            layer.detach()

    def parameter_shards(
        self, sharded_model: ShardedModel
    ) -> tuple[dict[str, ShardSpec], dict[str, str]]:
        """Return how this rank holds each parameter, and a weight of the decoder's used with it."""
        held: dict[str, ShardSpec] = {}
        used_with: dict[str, str] = {}
        for module, own in build_adapter_shards(
            sharded_model.decoder.model, sharded_model.shard_specs, self.config
        ).items():
            for name, holding in own.items():
                held[f"{PEFT_PREFIX}{module}.{name}"] = holding
        for layer, parts in list_packed_modules(build_decoder(sharded_model.decoder.model)).items():
            for part in parts:
                for name in (A, B, MAGNITUDE):
                    used_with[f"{PEFT_PREFIX}{to_hf_module_name(part)}.{name}"] = f"{layer}.weight"
        return held, {name: used_with[name] for name in held}

    def global_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the whole shapes of all parameters, also of those on other ranks."""
        return compute_adapter_shapes(self.adaptable_modules, self.config)

    def _want_merged(self, wanted: bool) -> None:
        if self._merged != wanted:
            what = "it is merged" if self._merged else "it is not merged"
            fix = "unmerge it first" if self._merged else "merge it first"
            raise InputError([Problem("adapter", what, fix)])


def validate_targets(model: Model, settings: LoRAConfig) -> None:
    """Refuse targets that name nothing in a model, also beside others that do.

    PEFT's folders may list targets of several families, and `attach_adapter` takes them. In what
    somebody wrote for one model such a name is misspelt, and would go unnoticed.
    """
    modules = find_adaptable_modules(build_decoder(model))
    if problems := _nothing_named(settings, model, modules):
        raise InputError(problems)


def _nothing_named(settings: LoRAConfig, model: Model, modules: Iterable[str]) -> list[Problem]:
    ends = ", ".join(sorted({name.rpartition(".")[2] for name in modules}))
    fix = f"use some of {ends}"
    if isinstance(settings.target_modules, str):
        fix = f"one text is a regular expression of whole names; list some of {ends}"
    what = f"names no linear layer of this {model.family} model"
    return [
        Problem("adapter.target_modules", f"{each!r} {what}", fix)
        for each in settings.unmatched_targets(modules)
    ]


def attach_adapter(
    decoder: Decoder,
    settings: LoRAConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    sharded_model: ShardedModel | None = None,
) -> DecoderAdapter:
    """Freeze a decoder and put a new adapter beside it, which changes nothing yet.

    The decoder stays in its own format; `dtype` is that of the adapter's parameters. Where several
    ranks share the model, `sharded_model` says how: each then has its part of the same adapter.
    Lists of targets may be for several families, as PEFT's are; `validate_targets` refuses such.
    """
    modules = find_adaptable_modules(
        decoder if sharded_model is None else build_decoder(decoder.model)
    )
    chosen = {name: part for name, part in modules.items() if settings.targets_module(name)}
    if not chosen:
        raise InputError(_nothing_named(settings, decoder.model, modules))
    held = None
    if sharded_model is not None:
        held = build_adapter_shards(decoder.model, sharded_model.shard_specs, settings)
    generator = torch.Generator().manual_seed(seed)
    where: dict[str, Any] = {"device": next(decoder.parameters()).device, "dtype": dtype}
    pairs = {}
    for name, (rows, inputs) in chosen.items():
        rank = settings.rank_of(name)
        # Drawn whole on every rank, also for layers of others: all have parts of the same.
        a = _drawn(rank, inputs, settings, generator)
        if held is not None and name not in held:
            continue
        count = rows
        if held is not None:
            a, count = held[name][A].select_local(a).clone(), held[name][B].shape[0]
        b = torch.zeros(count, rank, **where)
        # Measured below, once the pair knows its rows.
        magnitude = torch.zeros(count, **where) if settings.dora else None
        scale, dropout = settings.scale_of(name), settings.dropout
        pairs[name] = LoRAPair(a.to(**where), b, magnitude, scale=scale, dropout=dropout)
    adapter = DecoderAdapter(decoder, settings, pairs, sharded_model)
    if settings.dora:
        for layer in adapter.layers.values():
            layer.init_dora_magnitudes()
    return adapter


def compute_adapter_shapes(
    modules: Mapping[str, tuple[int, int]], settings: LoRAConfig
) -> dict[str, tuple[int, ...]]:
    """Return the parameters of an adapter with their shapes, for modules of so many rows each."""
    found: dict[str, tuple[int, ...]] = {}
    for name, (rows, inputs) in modules.items():
        if settings.targets_module(name):
            rank = settings.rank_of(name)
            found[f"{PEFT_PREFIX}{name}.{A}"] = (rank, inputs)
            found[f"{PEFT_PREFIX}{name}.{B}"] = (rows, rank)
            if settings.dora:
                found[f"{PEFT_PREFIX}{name}.{MAGNITUDE}"] = (rows,)
    return found


def find_adapted_layers(decoder: Decoder, settings: LoRAConfig) -> set[int]:
    """Return the numbers of a decoder's layers that settings put an adapter in."""
    return {
        int(name.split(".")[1])
        for name, parts in list_packed_modules(decoder).items()
        if any(settings.targets_module(to_hf_module_name(part)) for part in parts)
    }


def build_adapter_shards(
    model: Model, shard_specs: Mapping[str, ShardSpec], settings: LoRAConfig
) -> dict[str, dict[str, ShardSpec]]:
    """Return how a rank holds the parameters of the pairs it has, by module and PEFT's name.

    `shard_specs` are those of the model's own parameters, as far as the rank has them.
    """
    found = {}
    for layer, parts in list_packed_modules(build_decoder(model)).items():
        weight = shard_specs.get(f"{layer}.weight")
        for part in parts if weight is not None else ():
            name = to_hf_module_name(part)
            if weight is not None and settings.targets_module(name):
                here = map_fused_rows(part, weight)[1]
                found[name] = build_pair_shards(weight, here, part.num_rows, settings.rank_of(name))
    return found


def build_lora_config(decoder: Decoder, described: LoRASpec, **settings: Any) -> LoRAConfig:
    """Return the config of a workload's adapter; `settings` are further fields of `LoRAConfig`.

    Its targets are words for kinds of matrices, which become the names of a decoder's modules.
    """
    if "experts" in described.targets:
        what = "routed experts carry no adapters here"
        raise InputError([Problem("target_modules", what, "leave experts out")])
    chosen = tuple(
        to_hf_module_name(part)
        for name, parts in list_packed_modules(decoder).items()
        for part in parts
        if _word(name) in described.targets
    )
    return LoRAConfig(rank=described.rank, target_modules=chosen, **settings)


def _word(layer: str) -> LoRATarget:
    """Return a workload's word for a layer of ours."""
    last = layer.rpartition(".")[2]
    if ".mixer." in layer:
        return "out" if last in ("o", "out") else "qkv"
    return "down" if last in ("down", "latent_up") else "up"


def find_adaptable_modules(decoder: Decoder) -> dict[str, tuple[int, int]]:
    """Return the modules of theirs that can be adapted, with their outputs and inputs."""
    return {
        to_hf_module_name(part): part.links[0].shape[:2]  # type: ignore[misc]
        for parts in list_packed_modules(decoder).values()
        for part in parts
    }


def to_hf_module_name(part: PackedModule) -> str:
    """Return a module's name in transformers' model."""
    name = part.links[0].checkpoint_name.removesuffix(".weight")
    for stored, opened in _RENAMED.items():
        if name.startswith(stored):
            return opened + name.removeprefix(stored)
    return name


def _drawn(rank: int, inputs: int, settings: LoRAConfig, generator: torch.Generator) -> Tensor:
    """Draw A as PEFT does: Kaiming's uniform of gain 1/√3, or by the rank."""
    if settings.init == "gaussian":
        return torch.randn(rank, inputs, generator=generator) / rank
    return (2 * torch.rand(rank, inputs, generator=generator) - 1) / math.sqrt(inputs)


def _layers(
    decoder: Decoder, pairs: LoRAPairs, sharded_model: ShardedModel | None
) -> dict[str, AdaptedLinear]:
    found = {}
    for name, parts in list_packed_modules(
        decoder if sharded_model is None else build_decoder(decoder.model)
    ).items():
        adapted = [
            AdaptedModule(part, pairs[to_hf_module_name(part)])
            for part in parts
            if to_hf_module_name(part) in pairs
        ]
        if not adapted:
            continue
        layer = decoder.get_submodule(name)
        assert isinstance(layer, Linear)
        _check(name, layer)
        block = decoder.get_submodule(".".join(name.split(".")[:2]))
        among = None
        if sharded_model is not None:
            among = WeightSharding(
                sharded_model.shard_specs[f"{name}.weight"], sharded_model.mesh["tp"]
            )
        found[name] = AdaptedLinear(layer, block, adapted, among)
    return found


def _check(name: str, layer: Linear) -> None:
    if isinstance(layer.tp_overlap, AdaptedLinear):
        what, fix = f"{name} has an adapter already", "remove that one first"
    elif layer.tp_overlap is not None:
        what, fix = f"{name} is shared by several ranks or served", "adapt a decoder of one device"
    elif layer.weight.is_meta:
        what, fix = f"{name} has no weights yet", "materialize or load the decoder first"
    elif not layer.weight.is_floating_point():
        what, fix = f"{name} holds {layer.weight.dtype}", "load the decoder in bf16 or fp32"
    else:
        return
    raise InputError([Problem("adapter", what, fix)])


def _put(root: nn.Module, name: str, pair: LoRAPair) -> None:
    """Hang a pair into a tree of modules, so that its parameters have PEFT's names."""
    *above, last = name.split(".")
    place = root
    for each in above:
        if each not in dict(place.named_children()):
            place.add_module(each, nn.Module())
        place = place.get_submodule(each)
    place.add_module(last, pair)
