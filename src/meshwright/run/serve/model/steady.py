"""Products that give a row the same bits whatever else is in the batch.

Libraries choose how to cut a product by its number of rows, and a sum cut otherwise rounds
otherwise: an answer then depends on who asked beside it. Here every product is cut into the same
tiles, and each output is one sum in one order; that costs speed where rows are few or many.

With attention that does the same, a model's answers depend on their own prompts alone, on one kind
of GPU. On a processor torch's libraries compute, which promise nothing.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.grouped_matmul_triton import Tiles, times_weights
from meshwright.run.kernels.language import Backend, on_triton
from meshwright.run.kernels.products import flat
from meshwright.run.nn.attention import Attention
from meshwright.run.nn.block import Block
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.experts import Experts
from meshwright.run.nn.linear import Linear

TILES = {2: Tiles(64, 128, 64, warps=4, stages=4), 4: Tiles(64, 64, 32, warps=4, stages=2)}
"""By the bytes of a number; of few rows, so that decoding does not wait for empty ones."""


def steady_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: Backend = "auto"
) -> Tensor:
    """Return x · weightᵀ + bias; each row's bits follow from that row alone."""
    if not on_triton(backend, x):
        return functional.linear(x, weight, bias)
    rows = flat(x)
    ends = torch.full((1,), len(rows), dtype=torch.int32, device=x.device)
    biases = None if bias is None else bias[None]
    y = times_weights(rows, weight[None], ends, biases, TILES[x.dtype.itemsize])
    return y.view(*x.shape[:-1], len(weight))


class Steady:
    """How a linear layer computes steadily; `Linear.low_precision` calls it."""

    name = "steady"

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, input_at_hand: bool = False
    ) -> Tensor:
        """Return x · weightᵀ + bias."""
        del input_at_hand
        return steady_linear(x, weight, bias)


def make_steady(decoder: Decoder) -> None:
    """Let all linear layers of a decoder compute steadily; what cannot is refused."""
    problems = [
        Problem("invariant", f"{what} depend on what else is in the batch", "serve it without")
        for what in _unsteady(decoder)
    ]
    if problems:
        raise InputError(problems)
    for part in _linears(decoder):
        part.low_precision = Steady()


def _unsteady(decoder: Decoder) -> list[str]:
    """Say which parts of a decoder have products of other kinds."""
    found = []
    if any(isinstance(part, Experts) for part in decoder.modules()):
        found.append("routed experts")
    mixers = [layer.mixer for layer in decoder.layers if isinstance(layer, Block)]
    if not all(mixer is None or isinstance(mixer, Attention) for mixer in mixers):
        found.append("recurrences and latent attention")
    if not all(isinstance(part.low_precision, Steady | None) for part in _linears(decoder)):
        found.append("quantised weights")
    return found


def _linears(module: nn.Module) -> list[Linear]:
    return [part for part in module.modules() if isinstance(part, Linear)]
