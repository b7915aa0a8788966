"""What mixes tokens in a block: attention in its kinds, and the recurrences that replace it.

Each kind lists its weights, its parameters that are not matrices, and the FLOPs of the part
between the matrices, for a given model width. None of them knows how it is parallelised.
"""

import math
from functools import partial
from typing import Literal

import msgspec

from meshwright.spec.field_checks import FieldChecker
from meshwright.spec.model.rotary import AttentionTemperature, Rotary, mean_context_length
from meshwright.spec.model.weights import Weight

QkNorm = Literal["none", "head", "full", "l2"]


_matrix = partial(Weight, part="mixer")


class AttentionSpec(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="attention",
    tag_field="kind",
):
    """Softmax attention with grouped keys and values; multi-head when the counts are equal."""

    heads: int
    """Query heads."""
    kv_heads: int
    """Key and value heads; divides `heads`."""
    head_dim: int
    """Width of one head."""
    qkv_bias: bool = False
    """The query, key and value products add a bias."""
    out_bias: bool = False
    """The output product adds a bias."""
    qk_norm: QkNorm = "none"
    """Norm of queries and keys: per head, over all heads, or an L2 norm without weights."""
    window: int | None = None
    """Each token sees only this many positions, itself included."""
    chunk: int | None = None
    """Attention starts afresh every so many positions (Llama 4)."""
    rotary: Rotary | None = None
    """Rotary settings; None leaves positions to the model (learned, ALiBi or none)."""
    sinks: bool = False
    """A learned logit per head that takes attention without giving value (gpt-oss)."""
    gate: bool = False
    """The output passes a sigmoid gate made by the query product (Qwen3-Next)."""
    scale: float | None = None
    """Multiplier of the scores; None is 1/sqrt(head_dim)."""
    softcap: float | None = None
    """Scores are squashed by tanh to this range (Gemma 2)."""
    clip: float | None = None
    """Queries, keys and values are cut off at plus and minus this (OLMo)."""
    temperature: AttentionTemperature | None = None
    """Queries grow with their position (Llama 4, in its layers without rotary)."""
    causal: bool = True
    """Tokens see only what came before; false in vision towers."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            window=self.window,
            chunk=self.chunk,
        )
        if bounds.is_valid("heads", "kv_heads") and self.heads % self.kv_heads:
            what = f"{self.kv_heads} does not divide heads={self.heads}"
            bounds.add("kv_heads", what, f"use {math.gcd(self.heads, self.kv_heads)}")
        bounds.raise_problems()

    def list_weights(self, hidden: int) -> tuple[Weight, ...]:
        """List the four projections."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        out_of_query = 2 * queries if self.gate else queries
        kv = self.kv_heads
        return (
            _matrix("q", hidden, out_of_query, "column", self.qkv_bias, max_shards=self.heads),
            _matrix("k", hidden, keys, "column", self.qkv_bias, max_shards=kv),
            _matrix("v", hidden, keys, "column", self.qkv_bias, max_shards=kv),
            _matrix("o", queries, hidden, "row", self.out_bias, max_shards=self.heads),
        )

    def count_vector_parameters(self, norm_bias: bool) -> int:
        """Count parameters that are not matrices: query and key norms, sinks."""
        each = 2 if norm_bias else 1
        norms = {
            "none": 0,
            "l2": 0,
            "head": 2 * self.head_dim * each,
            "full": (self.heads + self.kv_heads) * self.head_dim * each,
        }[self.qk_norm]
        return norms + (self.heads if self.sinks else 0)

    def core_flops(self, length: int) -> float:
        """FLOPs per token of scores and weighted sum, counting only visible positions."""
        context = mean_context_length(length, self.window, self.chunk, self.causal)
        return 4 * self.heads * self.head_dim * context

    def non_causal_flops(self, length: int) -> float:
        """FLOPs per token as if every token saw the whole sequence (the square convention)."""
        return 4 * self.heads * self.head_dim * length


class LatentAttentionSpec(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="latent",
    tag_field="kind",
):
    """Multi-head latent attention (DeepSeek-V2): keys and values are kept as one small vector."""

    heads: int
    """Query heads."""
    kv_rank: int
    """Width of the latent that stands for keys and values."""
    nope_dim: int
    """Width of a head's part without position."""
    rope_dim: int
    """Width of a head's rotary part; its key is shared by all heads."""
    value_dim: int
    """Width of a head's value."""
    q_rank: int | None = None
    """Width of the query latent; None projects queries directly."""
    rotary: Rotary | None = None
    """Rotary settings of the `rope_dim` part."""
    bias: bool = False
    """Biases on the down projections and the output."""
    causal: bool = True
    """Tokens see only what came before."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(
            heads=self.heads,
            kv_rank=self.kv_rank,
            nope_dim=self.nope_dim,
            rope_dim=self.rope_dim,
            value_dim=self.value_dim,
            q_rank=self.q_rank,
        )
        bounds.raise_problems()

    def list_weights(self, hidden: int) -> tuple[Weight, ...]:
        """List the down and up projections; the down ones are replicated under tensor parallel."""
        heads, key = self.heads, self.nope_dim + self.rope_dim
        if self.q_rank is None:
            queries = [_matrix("q", hidden, heads * key, max_shards=heads)]
        else:
            queries = [
                _matrix("q_down", hidden, self.q_rank, "none", self.bias),
                _matrix("q_up", self.q_rank, heads * key, max_shards=heads),
            ]
        return (
            *queries,
            _matrix("kv_down", hidden, self.kv_rank + self.rope_dim, "none", self.bias),
            _matrix("kv_up", self.kv_rank, heads * (self.nope_dim + self.value_dim),
                   max_shards=heads),
            _matrix("o", heads * self.value_dim, hidden, "row", self.bias, max_shards=heads),
        )  # fmt: skip

    def count_vector_parameters(self, norm_bias: bool) -> int:
        """Count the weights of the norms of the two latents (always RMS norms)."""
        del norm_bias
        return self.kv_rank + (self.q_rank or 0)

    def core_flops(self, length: int) -> float:
        """FLOPs per token of scores and weighted sum in the expanded form that training uses."""
        return (
            self.non_causal_flops(length) * mean_context_length(length, causal=self.causal) / length
        )

    def non_causal_flops(self, length: int) -> float:
        """FLOPs per token as if every token saw the whole sequence."""
        return 2 * self.heads * (self.nope_dim + self.rope_dim + self.value_dim) * length


class GatedDeltaNetSpec(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="gated-delta",
    tag_field="kind",
):
    """Gated delta-rule linear attention (Qwen3-Next): a matrix state per head, no score matrix."""

    key_heads: int
    """Heads of queries and keys."""
    value_heads: int
    """Heads of values and states."""
    key_dim: int
    """Width of a key head."""
    value_dim: int
    """Width of a value head."""
    conv_width: int = 4
    """Taps of the short convolution over tokens."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(
            key_heads=self.key_heads,
            value_heads=self.value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            conv_width=self.conv_width,
        )
        bounds.raise_problems()

    def list_weights(self, hidden: int) -> tuple[Weight, ...]:
        """List the fused input projection, the gates and the output."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        most = self.key_heads
        return (
            _matrix("qkvz", hidden, 2 * keys + 2 * values, max_shards=most),
            _matrix("gates", hidden, 2 * self.value_heads, max_shards=most),
            _matrix("o", values, hidden, "row", max_shards=most),
        )

    def count_vector_parameters(self, norm_bias: bool) -> int:
        """Count the convolution, the decay and step biases and the output norm."""
        del norm_bias
        mixed = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        return mixed * self.conv_width + 2 * self.value_heads + self.value_dim

    def core_flops(self, length: int) -> float:
        """FLOPs per token of the recurrence: read the old value, write the delta, read out."""
        del length
        return 6 * self.value_heads * self.key_dim * self.value_dim

    def non_causal_flops(self, length: int) -> float:
        """Equal to `core_flops`: there is no square to count."""
        return self.core_flops(length)


class Mamba2Spec(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag="mamba2",
    tag_field="kind",
):
    """The Mamba-2 state-space mixer (Nemotron-H): a decaying matrix state per head."""

    heads: int
    """State heads."""
    head_dim: int
    """Width of one head."""
    state_dim: int
    """Columns of a head's state."""
    groups: int
    """Groups that share the input and output maps of the state."""
    conv_width: int = 4
    """Taps of the short convolution over tokens."""
    conv_bias: bool = True
    """The convolution adds a bias."""
    bias: bool = False
    """The two projections add a bias."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(
            heads=self.heads,
            head_dim=self.head_dim,
            state_dim=self.state_dim,
            groups=self.groups,
            conv_width=self.conv_width,
        )
        bounds.raise_problems()

    def _mixed(self) -> int:
        return self.heads * self.head_dim + 2 * self.groups * self.state_dim

    def list_weights(self, hidden: int) -> tuple[Weight, ...]:
        """List the fused input projection and the output."""
        inner = self.heads * self.head_dim
        fused = inner + self._mixed() + self.heads
        return (
            _matrix("in", hidden, fused, bias=self.bias, max_shards=self.groups),
            _matrix("out", inner, hidden, "row", self.bias, max_shards=self.groups),
        )

    def count_vector_parameters(self, norm_bias: bool) -> int:
        """Count the convolution, decay, step bias, skip and gated norm."""
        del norm_bias
        conv = self._mixed() * (self.conv_width + (1 if self.conv_bias else 0))
        return conv + 3 * self.heads + self.heads * self.head_dim

    def core_flops(self, length: int) -> float:
        """FLOPs per token of the recurrence: one outer product in, one product out."""
        del length
        return 4 * self.heads * self.head_dim * self.state_dim

    def non_causal_flops(self, length: int) -> float:
        """Equal to `core_flops`: there is no square to count."""
        return self.core_flops(length)


Mixer = AttentionSpec | LatentAttentionSpec | GatedDeltaNetSpec | Mamba2Spec
