"""The feed-forward half of a block: one MLP, or routed experts with shared ones beside them."""

from typing import Literal

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.model.mixers import MOST, require_positive
from meshwright.spec.model.weights import Weight
from meshwright.spec.read import shown

Activation = Literal["silu", "gelu", "gelu-tanh", "quick-gelu", "relu", "relu2", "swiglu-clamped"]
RouterBias = Literal["none", "linear", "balance"]
Scoring = Literal["softmax", "sigmoid"]


class Mlp(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="mlp",
    tag_field="kind",
):
    """A dense feed-forward layer."""

    width: int
    """Inner width."""
    gated: bool = True
    """Two inner products, one gating the other (SwiGLU, GeGLU), rather than one."""
    activation: Activation = "silu"
    """The non-linearity."""
    bias: bool = False
    """The products add biases."""

    def __post_init__(self) -> None:
        require_positive(self, "width")

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """List the up (and gate) and down products."""
        up = Weight("up", hidden, self.width, "column", self.bias)
        down = Weight("down", self.width, hidden, "row", self.bias)
        return (up._replace(name="gate"), up, down) if self.gated else (up, down)

    def vectors(self, hidden: int) -> int:
        """Count parameters that are not matrices: none."""
        del hidden
        return 0


class Experts(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="experts",
    tag_field="kind",
):
    """A mixture of experts: a router picks `top_k` of `count` for each token."""

    count: int
    """Routed experts."""
    top_k: int
    """Experts each token visits."""
    width: int
    """Inner width of one routed expert."""
    shared_width: int = 0
    """Inner width of all shared experts together; 0 has none."""
    shared_gate: bool = False
    """The shared experts' output passes a gate of its own (Qwen2-MoE)."""
    gated: bool = True
    """Experts have two inner products, one gating the other."""
    activation: Activation = "silu"
    """The non-linearity inside the experts."""
    bias: bool = False
    """Expert products add biases (gpt-oss)."""
    router_bias: RouterBias = "none"
    """A bias of the router's product, or one that balances load without a loss (DeepSeek-V3)."""
    scoring: Scoring = "softmax"
    """How router outputs become weights."""
    normalise: bool = True
    """The chosen experts' weights are scaled to sum to one."""
    scale: float = 1.0
    """Multiplier of the routed experts' output."""
    groups: int = 1
    """Groups of experts; routing picks groups first (limits the nodes a token visits)."""
    groups_used: int = 1
    """Groups a token may visit."""
    latent: int | None = None
    """Routed experts work in this smaller width, reached by a shared down and up product."""

    def __post_init__(self) -> None:
        require_positive(self, "count", "top_k", "width", "groups", "groups_used")
        if self.latent is not None:
            require_positive(self, "latent")
        problems = []
        if self.top_k > self.count:
            problems.append(
                Problem("top_k", f"{self.top_k} is more than the {self.count} experts",
                        f"use at most {self.count}")
            )  # fmt: skip
        if not 0 <= self.shared_width <= MOST:
            what = f"{shown(self.shared_width)} is not from 0 to {MOST:,}"
            problems.append(Problem("shared_width", what, "use 0"))
        if self.groups_used > self.groups:
            problems.append(
                Problem("groups_used", f"{self.groups_used} is more than groups={self.groups}",
                        f"use at most {self.groups}")
            )  # fmt: skip
        if problems:
            raise InputError(problems)

    def weights(self, hidden: int) -> tuple[Weight, ...]:
        """List the router, the shared experts, and the routed ones with their copies."""
        found = [Weight("router", hidden, self.count, "none", self.router_bias == "linear")]
        if self.shared_width:
            shared = Mlp(width=self.shared_width, gated=self.gated, activation=self.activation)
            found += [w._replace(name=f"shared_{w.name}") for w in shared.weights(hidden)]
            if self.shared_gate:
                found.append(Weight("shared_gate_scalar", hidden, 1, "none"))
        width = hidden
        if self.latent is not None:
            width = self.latent
            found.append(Weight("latent_down", hidden, width, "none"))
            found.append(Weight("latent_up", width, hidden, "none"))
        routed = Mlp(width=self.width, gated=self.gated, bias=self.bias).weights(width)
        found += [
            w._replace(name=f"expert_{w.name}", copies=self.count, active=self.top_k)
            for w in routed
        ]
        return tuple(found)

    def vectors(self, hidden: int) -> int:
        """Count the load-balancing bias, one number per expert."""
        del hidden
        return self.count if self.router_bias == "balance" else 0


FeedForward = Mlp | Experts
