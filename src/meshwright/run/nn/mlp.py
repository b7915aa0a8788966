"""`MLPLayer`: a dense feed-forward layer, gated (one product for gate and up) or plain.

`gate_up.weight` stacks the rows of the gate, then of up; a layer without a gate has `up.weight`.

Shapes: B sequences, T positions, D hidden, F inner width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.activation.glu import activation_reference, glu
from meshwright.run.kernels.gemm.glu_linear import glu_linear
from meshwright.run.kernels.triton_compat import should_use_triton
from meshwright.run.nn.linear.fp8_glu_linear import fp8_glu_linear
from meshwright.run.nn.linear.fp8_linear import Fp8TrainingLinearMethod
from meshwright.run.nn.linear.linear import Linear
from meshwright.run.nn.recompute import (
    NO_RECOMPUTE,
    RecomputedFunction,
    RecomputeOpOrFull,
    drop_saved_tensors,
)
from meshwright.run.nn.sharding.parallel_hooks import (
    ParallelHooks,
    apply_input_hook,
    apply_output_hook,
)
from meshwright.spec.model import feedforward

_DROP_INPUT: frozenset[RecomputeOpOrFull] = frozenset({"layernorm", "mlp"})
"""Operations whose recomputation makes the norm before a layer anew."""


class MLPLayer(nn.Module):
    """A feed-forward layer as a model's `MLPSpec` describes it."""

    def __init__(
        self,
        spec: feedforward.MLPSpec,
        hidden: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.is_gated, self.activation = spec.gated, spec.activation
        self.recompute: frozenset[RecomputeOpOrFull] = NO_RECOMPUTE
        self.input_is_normed = True
        """Whether the input is a norm's output, which recompute can drop."""
        self.parallel_hooks: ParallelHooks | None = None
        """Where ranks share the inner width, the way to them and back."""
        self.fused_gate_up: Callable[[Tensor], Tensor | None] | None = None
        """Returns what the last product reads from one kernel, or None where it does not."""
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        if spec.gated:
            self.gate_up = Linear(hidden, 2 * spec.width, bias=spec.bias, **where)
        else:
            self.up = Linear(hidden, spec.width, bias=spec.bias, **where)
        self.down = Linear(spec.width, hidden, bias=spec.bias, **where)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transform each token by itself."""
        if self.fused_gate_up is not None and (inner_BTF := self.fused_gate_up(x_BTD)) is not None:
            return self.project_down(inner_BTF)
        if "mlp" in self.recompute:
            # Backward needs what the last product read, not what it gave: that one runs once.
            replay = RecomputedFunction(lambda x: self.activate(self.project_up(x)))
            inner_BTF = replay(x_BTD)
            with drop_saved_tensors((inner_BTF, replay.recompute_output)):
                return self.project_down(inner_BTF, input_is_free=True)
        raw = self.project_up(x_BTD)
        if "mlp_act" not in self.recompute:
            return self.project_down(self.activate(raw))
        return self._end_again(raw)

    def _end_again(self, raw: Tensor) -> Tensor:
        """Activate and return the last product; backward makes the activation again."""
        down = self.down
        if self.is_gated and down.bias is None and down.tp_overlap is None:
            # It does so on its way through the activation, for one more write.
            if down.linear_method is None:
                whole = glu_linear(raw, down.weight, self.activation, gemm=down.gemm)
                return apply_output_hook(self.parallel_hooks, whole)
            low = down.linear_method
            if (
                isinstance(low, Fp8TrainingLinearMethod)
                and low.recipe.wgrad == "fp8"
                and should_use_triton("auto", raw)
            ):
                return apply_output_hook(
                    self.parallel_hooks, fp8_glu_linear(raw, down.weight, self.activation, low)
                )
        inner_BTF = self.activate(raw)
        with drop_saved_tensors((inner_BTF, lambda: self.activate(raw.detach()))):
            return self.project_down(inner_BTF, input_is_free=True)

    def project_up(self, x_BTD: Tensor) -> Tensor:
        """Return what the activation reads: gate and up, or up."""
        first = self.gate_up if self.is_gated else self.up
        dropped_input = self.input_is_normed and bool(_DROP_INPUT & self.recompute)
        with apply_input_hook(self.parallel_hooks, x_BTD) as inside:
            raw: Tensor = first(inside, input_is_free=dropped_input)
        return raw

    def activate(self, raw: Tensor) -> Tensor:
        """Return what the last product reads."""
        return (
            glu(raw, self.activation) if self.is_gated else apply_activation(raw, self.activation)
        )

    def project_down(self, inner_BTF: Tensor, *, input_is_free: bool = False) -> Tensor:
        """Return the last GEMM; `input_is_free` says that backward has its input anyway."""
        return apply_output_hook(
            self.parallel_hooks, self.down(inner_BTF, input_is_free=input_is_free)
        )


def apply_activation(x: Tensor, activation: feedforward.Activation) -> Tensor:
    """Apply a non-linearity that gates nothing."""
    if activation == "swiglu-clamped":
        what = "swiglu-clamped needs a gate"
        raise InputError([Problem("mlp.activation", what, "set mlp.gated = true")])
    return activation_reference(x, activation)
