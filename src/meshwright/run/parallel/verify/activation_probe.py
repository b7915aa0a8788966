"""`ActivationProbe`: what comes out of each operation of a decoder, by name and by sequence.

Operations are the embedding, every layer's mixer, what every layer adds to the stream (its
feed-forward part, and the mixer too where both run side by side), heads for later tokens, and what
the output head reads. Runs that recompute makes in backward are not looked at. Which microbatch a
chunk is working on is known by its tokens, as schedules order them freely.

Shapes: B sequences, T positions, D hidden.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_layer import DecoderLayer

FINAL_NORM = "final_norm"
"""What the output head reads, also where no norm stands before it."""
Activations = dict[str, dict[int, Tensor]]
"""For each operation and first sequence of a microbatch, what came out: float32, (B, T, D)."""


def make_microbatch_key(tokens_BT: Tensor) -> bytes:
    """Return what tells the tokens of microbatches apart."""
    found: bytes = tokens_BT.contiguous().numpy().tobytes()
    return found


class ActivationProbe:
    """Listens to one decoder."""

    def __init__(self, decoder: Decoder, first_rows: Mapping[bytes, int]) -> None:
        """`first_rows` has the number of the first sequence of each microbatch, by its tokens."""
        self.activations: Activations = {}
        self._decoder, self._first_rows = decoder, first_rows
        self._row: int | None = None
        self._embeds = False
        """Whether the embedding's next result is that of the tokens themselves."""
        if hasattr(decoder, "embedding"):
            self._listen("embedding", decoder.embedding)
        for number, layer in decoder.layers.named_children():
            assert isinstance(layer, DecoderLayer)
            self._listen_to_block(f"layers.{number}", layer)
        for index, head in enumerate(decoder.multi_token):
            self._listen(f"multi_token.{index}", head)
        if hasattr(decoder, "head"):
            decoder.apply_final_norm = self._around(decoder.apply_final_norm, FINAL_NORM)  # type: ignore[method-assign]

    def start(self, tokens_BT: Tensor, *, embeds: bool) -> None:
        """Note whose tokens run through a chunk next, and whether it embeds them."""
        self._row, self._embeds = self._first_rows[make_microbatch_key(tokens_BT)], embeds

    def _listen_to_block(self, name: str, block: DecoderLayer) -> None:
        if block.mixer is not None:
            self._listen(f"{name}.mixer", block.mixer)
        if block.mlp is not None:
            both = block.norm_placement in {"parallel", "parallel-shared"}
            self._listen(f"{name}.mixer + mlp" if both else f"{name}.mlp", block)

    def _listen(self, name: str, module: nn.Module) -> None:
        module.register_forward_hook(lambda _, __, out: self._note(name, out))

    def _around(self, call: Callable[..., Tensor], name: str) -> Callable[..., Tensor]:
        def inside(*args: Any) -> Tensor:
            found = call(*args)
            self._note(name, found)
            return found

        return inside

    def _note(self, name: str, out: Any) -> None:
        # While backward runs there is a graph task, as torch's own checkpointing tells.
        if self._row is None or torch._C._current_graph_task_id() != -1:  # noqa: SLF001
            return
        if name == "embedding":
            # Heads for later tokens look those up as well.
            if not self._embeds:
                return
            self._embeds = False
        # A layer gives what its last part made, and the stream that it is still to be added to.
        tensor: Tensor = out[0] if isinstance(out, tuple) else out
        self.activations.setdefault(name, {})[self._row] = tensor.detach().float().clone()


def list_operations(decoder: Decoder) -> list[str]:
    """Return the operations of a whole decoder as a token meets them."""
    names = ["embedding"]
    for number, layer in decoder.layers.named_children():
        assert isinstance(layer, DecoderLayer)
        both = layer.norm_placement in {"parallel", "parallel-shared"}
        if layer.mixer is not None:
            names.append(f"layers.{number}.mixer")
        if layer.mlp is not None:
            names.append(f"layers.{number}.{'mixer + mlp' if both else 'mlp'}")
    names.append(FINAL_NORM)
    return names + [f"multi_token.{number}" for number in range(len(decoder.multi_token))]


def list_backward_order(names: list[str]) -> list[str]:
    """Return parameters of a decoder as backward meets them, the last used first."""
    return sorted(names, key=_place, reverse=True)


_IN_LAYER = ("norm_mixer", "mixer", "norm_mixer_after", "norm_mlp", "mlp", "norm_mlp_after")
_IN_DECODER = ("embedding", "positions", "norm_embedding", "layers", "final_norm", "head")
_IN_PART = ("router", "qkv", "gate_up", "up", "o", "out", "down")


def _place(name: str) -> tuple[int, ...]:
    """Return numbers that order parameters as forward uses them."""
    first, *rest = name.split(".")
    if first == "multi_token":
        return (len(_IN_DECODER), int(rest[0]))
    place = _IN_DECODER.index(first)
    if first != "layers":
        return (place,)
    number, part, *own = rest
    within = _IN_PART.index(own[0]) if own and own[0] in _IN_PART else -1
    return (place, int(number), _IN_LAYER.index(part), within)
