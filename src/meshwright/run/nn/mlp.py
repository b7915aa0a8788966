"""`Mlp`: a dense feed-forward layer, gated (one product for gate and up) or plain.

`gate_up.weight` stacks the rows of the gate, then of up; a layer without a gate has `up.weight`.

Shapes: B sequences, T positions, D hidden, F inner width.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.glu import glu, plain_activate
from meshwright.run.kernels.glu_linear import glu_linear
from meshwright.run.kernels.language import on_triton
from meshwright.run.nn.fp8_glu import fp8_glu_linear
from meshwright.run.nn.fp8_linear import Fp8Linear
from meshwright.run.nn.linear import Linear
from meshwright.run.nn.passage import Passage, entered, left
from meshwright.run.nn.recompute import NOTHING, Op, Replay, dropped
from meshwright.spec.model import feedforward

_DROP_INPUT: frozenset[Op] = frozenset({"layernorm", "mlp"})
"""Operations whose recomputation makes the norm before a layer anew."""


class Mlp(nn.Module):
    """A feed-forward layer as a model's `Mlp` describes it."""

    def __init__(
        self,
        spec: feedforward.Mlp,
        hidden: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.gated, self.activation = spec.gated, spec.activation
        self.recompute: frozenset[Op] = NOTHING
        self.reads_norm = True
        """Whether the input is a norm's output, which recompute can drop."""
        self.passage: Passage | None = None
        """Where ranks share the inner width, the way to them and back."""
        self.in_one: Callable[[Tensor], Tensor | None] | None = None
        """Returns what the last product reads from one kernel, or None where it does not."""
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        if spec.gated:
            self.gate_up = Linear(hidden, 2 * spec.width, bias=spec.bias, **where)
        else:
            self.up = Linear(hidden, spec.width, bias=spec.bias, **where)
        self.down = Linear(spec.width, hidden, bias=spec.bias, **where)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transform each token by itself."""
        if self.in_one is not None and (inner_BTF := self.in_one(x_BTD)) is not None:
            return self.end(inner_BTF)
        if "mlp" in self.recompute:
            # Backward needs what the last product read, not what it gave: that one runs once.
            replay = Replay(lambda x: self.activate(self.raw(x)))
            inner_BTF = replay(x_BTD)
            with dropped((inner_BTF, replay.output)):
                return self.end(inner_BTF, at_hand=True)
        raw = self.raw(x_BTD)
        if "mlp_act" not in self.recompute:
            return self.end(self.activate(raw))
        return self._end_again(raw)

    def _end_again(self, raw: Tensor) -> Tensor:
        """Activate and return the last product; backward makes the activation again."""
        down = self.down
        if self.gated and down.bias is None and down.across is None:
            # It does so on its way through the activation, for one more write.
            if down.low_precision is None:
                whole = glu_linear(raw, down.weight, self.activation, products=down.products)
                return left(self.passage, whole)
            low = down.low_precision
            if isinstance(low, Fp8Linear) and low.recipe.wgrad == "fp8" and on_triton("auto", raw):
                return left(self.passage, fp8_glu_linear(raw, down.weight, self.activation, low))
        inner_BTF = self.activate(raw)
        with dropped((inner_BTF, lambda: self.activate(raw.detach()))):
            return self.end(inner_BTF, at_hand=True)

    def raw(self, x_BTD: Tensor) -> Tensor:
        """Return what the activation reads: gate and up, or up."""
        first = self.gate_up if self.gated else self.up
        dropped_input = self.reads_norm and bool(_DROP_INPUT & self.recompute)
        with entered(self.passage, x_BTD) as inside:
            raw: Tensor = first(inside, input_at_hand=dropped_input)
        return raw

    def activate(self, raw: Tensor) -> Tensor:
        """Return what the last product reads."""
        return glu(raw, self.activation) if self.gated else activate(raw, self.activation)

    def end(self, inner_BTF: Tensor, *, at_hand: bool = False) -> Tensor:
        """Return the last product; `at_hand` says that backward has what it reads anyway."""
        return left(self.passage, self.down(inner_BTF, input_at_hand=at_hand))


def activate(x: Tensor, activation: feedforward.Activation) -> Tensor:
    """Apply a non-linearity that gates nothing."""
    if activation == "swiglu-clamped":
        what = "swiglu-clamped needs a gate"
        raise InputError([Problem("mlp.activation", what, "set mlp.gated = true")])
    return plain_activate(x, activation)
