"""`DecoderAdapter`: the trainable part of a decoder whose own weights are frozen.

adapter = adapt(decoder, Lora(rank=16, alpha=32))
optimizer = torch.optim.AdamW(adapter.parameters())

The adapter's parameters have PEFT's names. They stand beside the decoder, not in it: what loads,
saves or shards the decoder sees the model that it always was.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import InputError, Problem
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.linear import Linear
from meshwright.run.posttrain.adapters.linear import Adapted, AdaptedLinear, LowRankPair
from meshwright.run.posttrain.adapters.settings import Lora
from meshwright.run.serve.model.lora import Part, parts_of
from meshwright.spec.workload.adapter import Adapter, Target

_RENAMED = {"backbone.": "model."}
"""Beginnings of names that transformers changes as it opens a checkpoint (Nemotron-H)."""

Pairs = Mapping[str, LowRankPair]

BEFORE = "base_model.model."
"""What PEFT's names have before those of the model's modules."""


class DecoderAdapter(nn.Module):
    """Low-rank additions to a decoder's linear layers, as one module of their own.

    Its modes `train()` and `eval()` say whether inputs are dropped.
    """

    def __init__(self, decoder: Decoder, settings: Lora, pairs: Pairs) -> None:
        """Put pairs, by the whole names of the modules, beside a decoder, which is frozen."""
        super().__init__()
        self.settings, self.pairs = settings, dict(pairs)
        """The pairs by the names of their modules."""
        # Beside the modules of this one: the decoder's parameters are not the adapter's.
        self._beside = (decoder, _layers(decoder, pairs))
        self._merged = False
        self._reversible = False
        decoder.requires_grad_(False)
        for name, pair in pairs.items():
            _put(self, f"{BEFORE}{name}", pair)
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

    @property
    def is_merged(self) -> bool:
        """Whether the decoder's weights hold the adapter just now."""
        return self._merged

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
    def disabled(self) -> Iterator[None]:
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

    def _want_merged(self, wanted: bool) -> None:
        if self._merged != wanted:
            what = "it is merged" if self._merged else "it is not merged"
            fix = "unmerge it first" if self._merged else "merge it first"
            raise InputError([Problem("adapter", what, fix)])


def adapt(
    decoder: Decoder,
    settings: Lora,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> DecoderAdapter:
    """Freeze a decoder and put a new adapter beside it, which changes nothing yet.

    The decoder stays in its own format; `dtype` is that of the adapter's parameters.
    """
    chosen = {name: part for name, part in modules_of(decoder).items() if settings.chooses(name)}
    if not chosen:
        ends = sorted({name.rpartition(".")[2] for name in modules_of(decoder)})
        what = f"{settings.targets!r} names no linear layer of this {decoder.model.family} model"
        raise InputError([Problem("targets", what, f"use some of {', '.join(ends)}")])
    generator = torch.Generator().manual_seed(seed)
    device = decoder.embedding.weight.device
    pairs = {}
    for name, (rows, inputs) in chosen.items():
        rank = settings.rank_of(name)
        a = _drawn(rank, inputs, settings, generator).to(device, dtype)
        b = torch.zeros(rows, rank, device=device, dtype=dtype)
        # Measured below, once the pair knows its rows.
        magnitude = torch.zeros(rows, device=device, dtype=dtype) if settings.dora else None
        scale, dropout = settings.scale_of(name), settings.dropout
        pairs[name] = LowRankPair(a, b, magnitude, scale=scale, dropout=dropout)
    adapter = DecoderAdapter(decoder, settings, pairs)
    if settings.dora:
        for layer in adapter.layers.values():
            layer.measure()
    return adapter


def lora_for(decoder: Decoder, described: Adapter, **settings: Any) -> Lora:
    """Return the settings of an adapter that a workload describes; `settings` are others of `Lora`.

    Its targets are words for kinds of matrices, which become the names of a decoder's modules.
    """
    if "experts" in described.targets:
        what = "routed experts carry no adapters here"
        raise InputError([Problem("targets", what, "leave experts out")])
    chosen = tuple(
        whole_name(part)
        for name, parts in parts_of(decoder).items()
        for part in parts
        if _word(name) in described.targets
    )
    return Lora(rank=described.rank, targets=chosen, **settings)


def _word(layer: str) -> Target:
    """Return a workload's word for a layer of ours."""
    last = layer.rpartition(".")[2]
    if ".mixer." in layer:
        return "out" if last in ("o", "out") else "qkv"
    return "down" if last in ("down", "latent_up") else "up"


def modules_of(decoder: Decoder) -> dict[str, tuple[int, int]]:
    """Return the modules of theirs that can be adapted, with their outputs and inputs."""
    return {
        whole_name(part): part.links[0].shape[:2]  # type: ignore[misc]
        for parts in parts_of(decoder).values()
        for part in parts
    }


def whole_name(part: Part) -> str:
    """Return a module's name in transformers' model."""
    name = part.links[0].theirs.removesuffix(".weight")
    for stored, opened in _RENAMED.items():
        if name.startswith(stored):
            return opened + name.removeprefix(stored)
    return name


def _drawn(rank: int, inputs: int, settings: Lora, generator: torch.Generator) -> Tensor:
    """Draw A as PEFT does: Kaiming's uniform of gain 1/√3, or by the rank."""
    if settings.start == "gaussian":
        return torch.randn(rank, inputs, generator=generator) / rank
    return (2 * torch.rand(rank, inputs, generator=generator) - 1) / math.sqrt(inputs)


def _layers(decoder: Decoder, pairs: Pairs) -> dict[str, AdaptedLinear]:
    found = {}
    for name, parts in parts_of(decoder).items():
        adapted = [
            Adapted(part, pairs[whole_name(part)]) for part in parts if whole_name(part) in pairs
        ]
        if not adapted:
            continue
        layer = decoder.get_submodule(name)
        assert isinstance(layer, Linear)
        _check(name, layer)
        block = decoder.get_submodule(".".join(name.split(".")[:2]))
        found[name] = AdaptedLinear(layer, block, adapted)
    return found


def _check(name: str, layer: Linear) -> None:
    if isinstance(layer.across, AdaptedLinear):
        what, fix = f"{name} has an adapter already", "remove that one first"
    elif layer.across is not None:
        what, fix = f"{name} is shared by several ranks or served", "adapt a decoder of one device"
    elif layer.weight.is_meta:
        what, fix = f"{name} has no weights yet", "materialise or load the decoder first"
    elif not layer.weight.is_floating_point():
        what, fix = f"{name} holds {layer.weight.dtype}", "load the decoder in bf16 or fp32"
    else:
        return
    raise InputError([Problem("adapter", what, fix)])


def _put(root: nn.Module, name: str, pair: LowRankPair) -> None:
    """Hang a pair into a tree of modules, so that its parameters have PEFT's names."""
    *above, last = name.split(".")
    place = root
    for each in above:
        if each not in dict(place.named_children()):
            place.add_module(each, nn.Module())
        place = place.get_submodule(each)
    place.add_module(last, pair)
