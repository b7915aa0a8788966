"""The feed-forward half of a block: one MLP, or routed experts with shared ones beside them."""

from functools import partial
from typing import Literal

import msgspec

from meshwright.spec.field_checks import FieldChecker
from meshwright.spec.model.weights import Weight

Activation = Literal["silu", "gelu", "gelu-tanh", "quick-gelu", "relu", "relu2", "swiglu-clamped"]
RouterBias = Literal["none", "linear", "balance"]
Scoring = Literal["softmax", "sigmoid"]


class MLPSpec(
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
        bounds = FieldChecker()
        bounds.count(width=self.width)
        bounds.raise_problems()

    def list_weights(self, hidden: int) -> tuple[Weight, ...]:
        """List the up (and gate) and down products."""
        up = Weight("up", hidden, self.width, "column", self.bias)
        down = Weight("down", self.width, hidden, "row", self.bias)
        return (up._replace(name="gate"), up, down) if self.gated else (up, down)

    def count_vector_parameters(self) -> int:
        """Count parameters that are not matrices: none."""
        return 0


class MoESpec(
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
        bounds = FieldChecker()
        bounds.count(
            count=self.count,
            top_k=self.top_k,
            width=self.width,
            groups=self.groups,
            groups_used=self.groups_used,
            latent=self.latent,
        )
        bounds.count(least=0, shared_width=self.shared_width)
        if bounds.is_valid("count", "top_k") and self.top_k > self.count:
            what = f"{self.top_k} is more than the {self.count} experts"
            bounds.add("top_k", what, f"use at most {self.count}")
        if bounds.is_valid("groups", "groups_used") and self.groups_used > self.groups:
            what = f"{self.groups_used} is more than groups={self.groups}"
            bounds.add("groups_used", what, f"use at most {self.groups}")
        bounds.raise_problems()

    def list_weights(self, hidden: int) -> tuple[Weight, ...]:
        """List the router, the shared experts, and the routed ones with their copies."""
        routes = Weight("router", hidden, self.count, "none", self.router_bias == "linear")
        found = [routes._replace(part="router")]
        beside = partial(Weight, split="none", part="shared")
        if self.shared_width:
            shared = MLPSpec(width=self.shared_width, gated=self.gated, activation=self.activation)
            found += [
                w._replace(name=f"shared_{w.name}", part="shared")
                for w in shared.list_weights(hidden)
            ]
            if self.shared_gate:
                found.append(beside("shared_gate_scalar", hidden, 1))
        width = hidden
        if self.latent is not None:
            width = self.latent
            found += [beside("latent_down", hidden, width), beside("latent_up", width, hidden)]
        routed = MLPSpec(width=self.width, gated=self.gated, bias=self.bias).list_weights(width)
        found += [
            w._replace(name=f"expert_{w.name}", copies=self.count, active=self.top_k, part="expert")
            for w in routed
        ]
        return tuple(found)

    def count_vector_parameters(self) -> int:
        """Count the load-balancing bias, one number per expert."""
        return self.count if self.router_bias == "balance" else 0


FeedForward = MLPSpec | MoESpec
