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
from meshwright.run.parallel.shards import Shard
from meshwright.run.parallel.usage import EMBEDDING, HEAD, first_unit


class GatheredUnits:
    """Sees to it that the units of a decoder have their weights when they are used."""

    def __init__(
        self,
        decoder: Decoder,
        learning: Mapping[str, Sequence[Shard]],
        frozen: Mapping[str, Sequence[Shard]],
        *,
        lets_go: bool,
        ahead: bool,
    ) -> None:
        """Both are the shards of each unit; `ahead` gathers the next unit's in good time."""
        self.frozen, self.lets_go, self.ahead = frozen, lets_go, ahead
        names = dict.fromkeys((*learning, *frozen))
        shards = {name: [*learning.get(name, ()), *frozen.get(name, ())] for name in names}
        self.shards: Mapping[str, Sequence[Shard]] = shards
        layers = [(f"layers.{key}", each) for key, each in decoder.layers.named_children()]
        self.order = [EMBEDDING, *(name for name, _ in layers), HEAD]
        multi_token = [(f"multi_token.{i}", each) for i, each in enumerate(decoder.multi_token)]
        self.order += [name for name, _ in multi_token]
        self._next: dict[str, str | None] = dict(pairwise((*self.order, "")))
        stays = {layers[-1][0]} if layers else set()
        for name, module in (*layers, *multi_token):
            if name in shards:
                self._watch(name, module, stays=name in stays)
        first = first_unit(decoder)
        self._reads_again = {name for name in self.order if name != EMBEDDING}
        if hasattr(decoder, "norm_embedding"):
            self._reads_again.add(EMBEDDING)
        if first in shards and hasattr(decoder, "embedding"):
            self._next[EMBEDDING] = _after_embedding(self.order, decoder)
            embed = self._around(decoder.embed, first, EMBEDDING)
            decoder.embed = embed  # type: ignore[method-assign]
        if HEAD in shards and hasattr(decoder, "head"):
            decoder.finish = self._around(decoder.finish, HEAD, HEAD)  # type: ignore[method-assign]
            decoder.head_loss = self._around(decoder.head_loss, HEAD, HEAD)  # type: ignore[method-assign]
            decoder.logits = self._around(decoder.logits, HEAD, HEAD)  # type: ignore[method-assign]
            decoder.read_head = self._around(decoder.read_head, HEAD, HEAD)  # type: ignore[method-assign]

    def _watch(self, name: str, module: nn.Module, *, stays: bool) -> None:
        module.register_forward_pre_hook(lambda *_: self._before(name, name))
        if self.lets_go:
            module.register_forward_hook(lambda _, __, out: self._after(name, out, stays=stays))

    def _around(self, call: Callable[..., Any], name: str, at: str) -> Callable[..., Any]:
        """Return a function of a decoder that has the weights of a unit while it runs."""

        def inside(*args: Any, **kwargs: Any) -> Any:
            self._before(name, at)
            found = call(*args, **kwargs)
            if self.lets_go:
                self._after(name, found, stays=name == HEAD)
            return found

        return inside

    def _before(self, name: str, at: str) -> None:
        """Have a unit's weights, and those on their way that the next place reads."""
        for shard in self.shards[name]:
            shard.whole()
        if self.ahead and self.lets_go:
            self._start(self._next[at])

    def _after(self, name: str, found: Any, *, stays: bool) -> None:
        learning = torch.is_grad_enabled()
        if learning and name in self._reads_again:
            reached = _Once(lambda: self._before_backward(name))
            for tensor in _tensors(found):
                if tensor.requires_grad:
                    tensor.register_hook(reached)  # type: ignore[no-untyped-call]
        if not (learning and stays):
            for shard in self.shards[name]:
                shard.free()

    def _before_backward(self, name: str) -> None:
        for shard in self.frozen.get(self._next[name] or "", ()):
            shard.free()
        for shard in self.shards[name]:
            shard.whole()
        before = self.order.index(name) - 1
        if self.ahead and before >= 0 and self.order[before] in self._reads_again:
            self._start(self.order[before])

    def _start(self, name: str | None) -> None:
        for shard in self.shards.get(name or "", ()):
            shard.start_gathering()


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
