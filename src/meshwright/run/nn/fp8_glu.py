"""A gated linear unit and the fp8 product that reads it, without keeping what lies between them.

What `kernels.glu_linear` does in the format of its operands, with a layer's fp8 recipe: only the
unit's argument is kept, backward of the unit writes its result once more on its way, and the
transposed fp8 copy for the weight's gradient is made of that, with forward's scale where a tensor
has one.

Bytes moved, beside those of the layer and the unit alone: one write and one read of the unit's
result in bf16, in exchange for the fp8 copy that is not kept from forward to backward.

Letters: N tokens, F the unit's width (its argument has 2F columns, gate first), M the product's.
"""

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from meshwright.run.kernels.deferred import leaf_of, now_or_late
from meshwright.run.kernels.glu import LIMIT, gate, ungate
from meshwright.run.kernels.gradient_format import gradient_format
from meshwright.run.kernels.multiply_fp8 import multiply_fp8
from meshwright.run.kernels.products import flat
from meshwright.run.nn.fp8_linear import Fp8Linear, WeightGradient, saved
from meshwright.spec.model.feedforward import Activation


def fp8_glu_linear(
    gate_up: torch.Tensor, weight_MF: torch.Tensor, activation: Activation, layer: Fp8Linear
) -> torch.Tensor:
    """Return glu(gate_up) · weightᵀ over the last axis; kernels run wherever the tensors are."""
    call = _Call(layer, activation, torch.is_grad_enabled())
    y: torch.Tensor = _GluProduct.apply(gate_up, weight_MF, call)  # type: ignore[no-untyped-call]
    return y


class _Call(NamedTuple):
    """What one call says besides its tensors."""

    layer: Fp8Linear
    activation: Activation
    training: bool


class _GluProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up: torch.Tensor, weight_MF: torch.Tensor, call: _Call
    ) -> torch.Tensor:
        layer = call.layer
        gate_up = gate_up.contiguous()
        narrow = layer.activation(flat(gate(gate_up, call.activation, LIMIT)), transpose=False)
        weights = layer.copies(weight_MF, transpose=call.training and layer.keeps_weights)
        y_NM = multiply_fp8(
            narrow.direct,
            weights.direct,
            dtype=gate_up.dtype,
            fast="forward" in layer.recipe.fast,
        )
        # Of the unit's result there is nothing but, perhaps, its scale.
        _, scale = saved(gate_up, narrow)
        ctx.save_for_backward(gate_up, scale, *saved(weight_MF, weights))
        ctx.call, ctx.dtype, ctx.leaf = call, gradient_format(weight_MF), leaf_of(weight_MF)
        tokens = gate_up.numel() // gate_up.shape[-1]
        return y_NM[:tokens].view(*gate_up.shape[:-1], weight_MF.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: Fp8Linear = ctx.call.layer
        fast = layer.recipe.fast
        gate_up, scale, w, w_scale = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1]
        dy_NM = flat(dy)
        narrow = layer.gradient(dy_NM, transpose=wanted)
        w_FM = layer.turned_weight(w, w_scale)
        dgated_NF = multiply_fp8(narrow.direct, w_FM, dtype=gate_up.dtype, fast="dgrad" in fast)[
            : len(dy_NM)
        ]
        dgated = dgated_NF.view(*gate_up.shape[:-1], w_FM.data.shape[0])
        dgate_up, gated = ungate(gate_up, dgated, ctx.call.activation, LIMIT, again=wanted)
        del dgated, dgated_NF
        dw = None
        if wanted:
            assert gated is not None
            dw = now_or_late(ctx.leaf, WeightGradient(layer, narrow, gated, scale, ctx.dtype))
        return dgate_up, dw, None
