"""`BlockSpec`: one layer of a model, and the norm it uses."""

from typing import Literal

import msgspec

from meshwright.spec.field_checks import FieldChecker
from meshwright.spec.model.feedforward import FeedForward
from meshwright.spec.model.layer_pattern import is_block_name
from meshwright.spec.model.token_mixers import Mixer
from meshwright.spec.model.weights import Weight
from meshwright.spec.serialization import format_value

NormKind = Literal["rms", "layer", "layer-plain"]
NormPosition = Literal["pre", "post", "sandwich", "parallel", "parallel-shared"]


class NormSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The normalisation a model uses throughout."""

    kind: NormKind = "rms"
    """RMS norm, layer norm, or layer norm without any weights (OLMo)."""
    eps: float = 1e-5
    """Guard against division by zero."""
    bias: bool = False
    """Layer norm adds a bias."""
    unit_offset: bool = False
    """Weights are stored as an offset from one (Gemma)."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.not_negative(eps=self.eps)
        bounds.raise_problems()

    def parameters(self, width: int) -> int:
        """Count the weights of one norm over `width` channels."""
        if self.kind == "layer-plain":
            return 0
        return width * (2 if self.bias else 1)


class BlockSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One layer: a token mixer, a feed-forward part, or both, with norms around them."""

    name: str
    """How the model's pattern calls this block."""
    mixer: Mixer | None = None
    """What mixes tokens; None in the feed-forward-only layers of hybrid models."""
    mlp: FeedForward | None = None
    """The feed-forward part; None in mixer-only layers."""
    norms: NormPosition = "pre"
    """Before each part, after it, both (sandwich), or before two parallel parts (own or shared)."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.mark_unreadable(name=self.name)
        if bounds.is_valid("name") and not is_block_name(self.name):
            bounds.add(
                "name", f"{format_value(self.name)} is not a word", "use letters, digits, - and _"
            )
        if self.mixer is None and self.mlp is None:
            bounds.add("mixer", "a block needs a mixer, an mlp, or both", "add one")
        bounds.raise_problems()

    def list_weights(self, hidden: int) -> tuple[Weight, ...]:
        """List every matrix of the block."""
        mixer = self.mixer.list_weights(hidden) if self.mixer is not None else ()
        mlp = self.mlp.list_weights(hidden) if self.mlp is not None else ()
        return mixer + mlp

    def count_norms(self) -> int:
        """Count the norms over the model's width."""
        parts = (self.mixer is not None) + (self.mlp is not None)
        if self.norms == "sandwich":
            return 2 * parts
        return 1 if self.norms == "parallel-shared" else parts

    def count_vector_parameters(self, hidden: int, norm: NormSpec) -> int:
        """Count parameters that are not matrices: norms, sinks, convolutions, balance biases."""
        mixer = self.mixer.count_vector_parameters(norm.bias) if self.mixer is not None else 0
        mlp = self.mlp.count_vector_parameters() if self.mlp is not None else 0
        return self.count_norms() * norm.parameters(hidden) + mixer + mlp

    def core_flops(self, length: int) -> float:
        """FLOPs per token between the mixer's matrices, forward, exactly counted."""
        return self.mixer.core_flops(length) if self.mixer is not None else 0.0

    def non_causal_flops(self, length: int) -> float:
        """The same as if attention were not causal."""
        return self.mixer.non_causal_flops(length) if self.mixer is not None else 0.0
