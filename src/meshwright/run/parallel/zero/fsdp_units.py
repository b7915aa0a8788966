"""Units of a decoder whose weights are gathered before use and let go after it.

`usage` says what a unit is. With ZeRO 3 a unit's weights are gathered before its forward pass,
while the unit before still computes, let go after it, and gathered again when a gradient reaches
its output, which is before any of its operations run backward, recomputation included. Who reduces
the gradients lets go of them then; frozen weights go once a gradient reaches the unit before. With
ZeRO 1 and 2 weights are on their way since the last update, and waited for.

The head stays from its forward pass to its backward pass, and so does the last layer: nothing comes
between that would use their memory. An embedding's backward pass reads no weights.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.run.nn.decoder import Decoder
from meshwright.run.parallel.zero.bucket_shard import BucketShard
from meshwright.run.parallel.zero.parameter_usage import EMBEDDING_UNIT, HEAD_UNIT, get_first_unit


class FSDPUnits:
    """Sees to it that the units of a decoder have their weights when they are used."""

    def __init__(
        self,
        decoder: Decoder,
        learning: Mapping[str, Sequence[BucketShard]],
        frozen_shards: Mapping[str, Sequence[BucketShard]],
        *,
        reshard_after_forward: bool,
        prefetch: bool,
    ) -> None:
        """Both are the shards of each unit; `prefetch` gathers the next unit's in good time."""
        self.frozen_shards, self.reshard_after_forward, self.prefetch = (
            frozen_shards,
            reshard_after_forward,
            prefetch,
        )
        names = dict.fromkeys((*learning, *frozen_shards))
        shards = {name: [*learning.get(name, ()), *frozen_shards.get(name, ())] for name in names}
        self.shards_by_unit: Mapping[str, Sequence[BucketShard]] = shards
        layers = [(f"layers.{key}", each) for key, each in decoder.layers.named_children()]
        self.unit_order = [EMBEDDING_UNIT, *(name for name, _ in layers), HEAD_UNIT]
        multi_token = [(f"multi_token.{i}", each) for i, each in enumerate(decoder.multi_token)]
        self.unit_order += [name for name, _ in multi_token]
        self._next: dict[str, str | None] = dict(pairwise((*self.unit_order, "")))
        stays = {layers[-1][0]} if layers else set()
        for name, module in (*layers, *multi_token):
            if name in shards:
                self._watch(name, module, stays=name in stays)
        first = get_first_unit(decoder)
        self._reads_again = {name for name in self.unit_order if name != EMBEDDING_UNIT}
        if hasattr(decoder, "norm_embedding"):
            self._reads_again.add(EMBEDDING_UNIT)
        if first in shards and hasattr(decoder, "embedding"):
            self._next[EMBEDDING_UNIT] = _after_embedding(self.unit_order, decoder)
            embed = self._around(decoder.embed, first, EMBEDDING_UNIT)
            decoder.embed = embed  # type: ignore[method-assign]
        if HEAD_UNIT in shards and hasattr(decoder, "head"):
            decoder.apply_final_norm = self._around(decoder.apply_final_norm, HEAD_UNIT, HEAD_UNIT)  # type: ignore[method-assign]
            decoder.head_loss = self._around(decoder.head_loss, HEAD_UNIT, HEAD_UNIT)  # type: ignore[method-assign]
            decoder.logits = self._around(decoder.logits, HEAD_UNIT, HEAD_UNIT)  # type: ignore[method-assign]
            decoder.with_head_weight = self._around(decoder.with_head_weight, HEAD_UNIT, HEAD_UNIT)  # type: ignore[method-assign]

    def _watch(self, name: str, module: nn.Module, *, stays: bool) -> None:
        module.register_forward_pre_hook(lambda *_: self._before(name, name))
        if self.reshard_after_forward:
            module.register_forward_hook(lambda _, __, out: self._after(name, out, stays=stays))

    def _around(self, call: Callable[..., Any], name: str, at: str) -> Callable[..., Any]:
        """Return a function of a decoder that has the weights of a unit while it runs."""

        def inside(*args: Any, **kwargs: Any) -> Any:
            self._before(name, at)
            found = call(*args, **kwargs)
            if self.reshard_after_forward:
                self._after(name, found, stays=name == HEAD_UNIT)
            return found

        return inside

    def _before(self, name: str, at: str) -> None:
        """Have a unit's weights, and those on their way that the next place reads."""
        for shard in self.shards_by_unit[name]:
            shard.wait_for_unshard()
        if self.prefetch and self.reshard_after_forward:
            self._start(self._next[at])

    def _after(self, name: str, found: Any, *, stays: bool) -> None:
        learning = torch.is_grad_enabled()
        if learning and name in self._reads_again:
            reached = _Once(lambda: self._before_backward(name))
            for tensor in _tensors(found):
                if tensor.requires_grad:
                    tensor.register_hook(reached)  # type: ignore[no-untyped-call]
        if not (learning and stays):
            for shard in self.shards_by_unit[name]:
                shard.reshard()

    def _before_backward(self, name: str) -> None:
        for shard in self.frozen_shards.get(self._next[name] or "", ()):
            shard.reshard()
        for shard in self.shards_by_unit[name]:
            shard.wait_for_unshard()
        before = self.unit_order.index(name) - 1
        if self.prefetch and before >= 0 and self.unit_order[before] in self._reads_again:
            self._start(self.unit_order[before])

    def _start(self, name: str | None) -> None:
        for shard in self.shards_by_unit.get(name or "", ()):
            shard.unshard()


class _Once:
    """A hook of several tensors of which the first to get a gradient counts."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def __call__(self, _: Tensor) -> None:
        if self._call is not None:
            call, self._call = self._call, None
            call()


def _after_embedding(order: Sequence[str], decoder: Decoder) -> str | None:
    """Name what comes after tokens are embedded; heads for later tokens embed them once more."""
    return None if len(decoder.multi_token) else order[1]


def _tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    elif isinstance(found, tuple):
        for each in found:
            yield from _tensors(each)
