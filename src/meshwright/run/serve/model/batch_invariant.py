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
from meshwright.run.kernels.gemm.gemm import view_as_matrix
from meshwright.run.kernels.moe.grouped_gemm_kernel import GroupedGemmTiles, launch_forward
from meshwright.run.kernels.triton_compat import KernelBackend, should_use_triton
from meshwright.run.nn.attention.self_attention import SelfAttention
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_layer import DecoderLayer
from meshwright.run.nn.linear.linear import Linear
from meshwright.run.nn.moe.moe_layer import MoELayer

TILES = {
    2: GroupedGemmTiles(64, 128, 64, warps=4, stages=4),
    4: GroupedGemmTiles(64, 64, 32, warps=4, stages=2),
}
"""By the bytes of a number; of few rows, so that decoding does not wait for empty ones."""


def batch_invariant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: KernelBackend = "auto"
) -> Tensor:
    """Return x · weightᵀ + bias; each row's bits follow from that row alone."""
    if not should_use_triton(backend, x):
        return functional.linear(x, weight, bias)
    rows = view_as_matrix(x)
    ends = torch.full((1,), len(rows), dtype=torch.int32, device=x.device)
    biases = None if bias is None else bias[None]
    y = launch_forward(rows, weight[None], ends, biases, TILES[x.dtype.itemsize])
    return y.view(*x.shape[:-1], len(weight))


class BatchInvariantLinearMethod:
    """How a linear layer computes steadily: a `Linear.linear_method`."""

    name = "steady"

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, *, input_is_free: bool = False
    ) -> Tensor:
        """Return x · weightᵀ + bias."""
        del input_is_free
        return batch_invariant_linear(x, weight, bias)


def enable_batch_invariance(decoder: Decoder) -> None:
    """Let all linear layers of a decoder compute steadily; what cannot is refused."""
    problems = [
        Problem(
            "batch_invariant", f"{what} depend on what else is in the batch", "serve it without"
        )
        for what in _unsteady(decoder)
    ]
    if problems:
        raise InputError(problems)
    for part in _linears(decoder):
        part.linear_method = BatchInvariantLinearMethod()


def _unsteady(decoder: Decoder) -> list[str]:
    """Say which parts of a decoder have products of other kinds."""
    found = []
    if any(isinstance(part, MoELayer) for part in decoder.modules()):
        found.append("routed experts")
    mixers = [layer.mixer for layer in decoder.layers if isinstance(layer, DecoderLayer)]
    if not all(mixer is None or isinstance(mixer, SelfAttention) for mixer in mixers):
        found.append("recurrences and latent attention")
    if not all(
        isinstance(part.linear_method, BatchInvariantLinearMethod | None)
        for part in _linears(decoder)
    ):
        found.append("quantised weights")
    return found


def _linears(module: nn.Module) -> list[Linear]:
    return [part for part in module.modules() if isinstance(part, Linear)]
