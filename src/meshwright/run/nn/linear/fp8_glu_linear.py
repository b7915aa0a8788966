"""A gated linear unit and the fp8 product that reads it, without keeping what lies between them.

What `kernels.gemm.glu_linear` does in the format of its operands, with a layer's fp8 recipe: only
the unit's argument is kept, backward of the unit writes its result once more on its way, and the
transposed fp8 copy for the weight's gradient is made of that, with forward's scale where a tensor
has one.

Bytes moved, beside those of the layer and the unit alone: one write and one read of the unit's
result in bf16, in exchange for the fp8 copy that is not kept from forward to backward.

Letters: N tokens, F the unit's width (its argument has 2F columns, gate first), M the product's.
"""

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from meshwright.run.kernels.activation.glu import DEFAULT_CLAMP_LIMIT, glu_backward, glu_forward
from meshwright.run.kernels.autograd import get_grad_dtype
from meshwright.run.kernels.fp8.scaled_mm import scaled_mm
from meshwright.run.kernels.gemm.gemm import view_as_matrix
from meshwright.run.kernels.weight_grad_store import compute_or_delay_wgrad, get_delayable_leaf
from meshwright.run.nn.linear.fp8_linear import (
    Fp8TrainingLinearMethod,
    Fp8WeightGrad,
    select_tensors_to_save,
)
from meshwright.spec.model.feedforward import Activation


def fp8_glu_linear(
    gate_up: torch.Tensor,
    weight_MF: torch.Tensor,
    activation: Activation,
    layer: Fp8TrainingLinearMethod,
) -> torch.Tensor:
    """Return glu(gate_up) · weightᵀ over the last axis; kernels run wherever the tensors are."""
    call = _Call(layer, activation, torch.is_grad_enabled())
    y: torch.Tensor = _GluProduct.apply(gate_up, weight_MF, call)  # type: ignore[no-untyped-call]
    return y


class _Call(NamedTuple):
    """What one call says besides its tensors."""

    layer: Fp8TrainingLinearMethod
    activation: Activation
    training: bool


class _GluProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate_up: torch.Tensor, weight_MF: torch.Tensor, call: _Call
    ) -> torch.Tensor:
        layer = call.layer
        gate_up = gate_up.contiguous()
        narrow = layer.quantize_activation(
            view_as_matrix(glu_forward(gate_up, call.activation, DEFAULT_CLAMP_LIMIT)),
            transpose=False,
        )
        weights = layer.quantize_weight(weight_MF, transpose=call.training and layer.caches_weights)
        y_NM = scaled_mm(
            narrow.direct,
            weights.direct,
            dtype=gate_up.dtype,
            fast_accum="forward" in layer.recipe.fast_accum_gemms,
        )
        # Of the unit's result there is nothing but, perhaps, its scale.
        _, scale = select_tensors_to_save(gate_up, narrow)
        ctx.save_for_backward(gate_up, scale, *select_tensors_to_save(weight_MF, weights))
        ctx.call, ctx.dtype, ctx.leaf = (
            call,
            get_grad_dtype(weight_MF),
            get_delayable_leaf(weight_MF),
        )
        tokens = gate_up.numel() // gate_up.shape[-1]
        return y_NM[:tokens].view(*gate_up.shape[:-1], weight_MF.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: Fp8TrainingLinearMethod = ctx.call.layer
        fast = layer.recipe.fast_accum_gemms
        gate_up, scale, w, w_scale = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1]
        dy_NM = view_as_matrix(dy)
        narrow = layer.quantize_gradient(dy_NM, transpose=wanted)
        w_FM = layer.make_transposed_weight(w, w_scale)
        dgated_NF = scaled_mm(narrow.direct, w_FM, dtype=gate_up.dtype, fast_accum="dgrad" in fast)[
            : len(dy_NM)
        ]
        dgated = dgated_NF.view(*gate_up.shape[:-1], w_FM.data.shape[0])
        dgate_up, gated = glu_backward(
            gate_up, dgated, ctx.call.activation, DEFAULT_CLAMP_LIMIT, again=wanted
        )
        del dgated, dgated_NF
        dw = None
        if wanted:
            assert gated is not None
            dw = compute_or_delay_wgrad(
                ctx.leaf, Fp8WeightGrad(layer, narrow, gated, scale, ctx.dtype)
            )
        return dgate_up, dw, None
