"""`Mlp`: a dense feed-forward layer, gated (one product for gate and up) or plain.

`gate_up.weight` stacks the rows of the gate, then of up; a layer without a gate has `up.weight`.

Shapes: B sequences, T positions, D hidden, F inner width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.glu import glu
from meshwright.run.nn.linear import Linear
from meshwright.run.nn.recompute import NOTHING, Op, Replay, dropped
from meshwright.spec.model import feedforward


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
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        if spec.gated:
            self.gate_up = Linear(hidden, 2 * spec.width, bias=spec.bias, **where)
        else:
            self.up = Linear(hidden, spec.width, bias=spec.bias, **where)
        self.down = Linear(spec.width, hidden, bias=spec.bias, **where)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transform each token by itself."""
        if "mlp" in self.recompute:
            # Backward needs what the last product read, not what it gave: that one runs once.
            replay = Replay(lambda x: self.activate(self.raw(x)))
            inner_BTF = replay(x_BTD)
            with dropped((inner_BTF, replay.output)):
                return self.end(inner_BTF)
        raw = self.raw(x_BTD)
        inner_BTF = self.activate(raw)
        if "mlp_act" not in self.recompute:
            return self.end(inner_BTF)
        with dropped((inner_BTF, lambda: self.activate(raw.detach()))):
            return self.end(inner_BTF)

    def raw(self, x_BTD: Tensor) -> Tensor:
        """Return what the activation reads: gate and up, or up."""
        raw: Tensor = self.gate_up(x_BTD) if self.gated else self.up(x_BTD)
        return raw

    def activate(self, raw: Tensor) -> Tensor:
        """Return what the last product reads."""
        return glu(raw, self.activation) if self.gated else activate(raw, self.activation)

    def end(self, inner_BTF: Tensor) -> Tensor:
        """Return the last product."""
        out: Tensor = self.down(inner_BTF)
        return out


def activate(x: Tensor, activation: feedforward.Activation) -> Tensor:
    """Apply a non-linearity that gates nothing."""
    match activation:
        case "silu":
            return functional.silu(x)
        case "gelu":
            return functional.gelu(x)
        case "gelu-tanh":
            return functional.gelu(x, approximate="tanh")
        case "quick-gelu":
            return x * torch.sigmoid(1.702 * x)
        case "relu":
            return functional.relu(x)
        case "relu2":
            return functional.relu(x).square()
        case "swiglu-clamped":
            what = "swiglu-clamped needs a gate"
            raise InputError([Problem("mlp.activation", what, "set mlp.gated = true")])
