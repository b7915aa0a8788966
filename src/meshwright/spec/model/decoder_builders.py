"""Models from a handful of numbers: the usual dense and mixture-of-experts decoders."""

from meshwright.spec.model.block import BlockSpec, NormSpec
from meshwright.spec.model.feedforward import Activation, MLPSpec, MoESpec
from meshwright.spec.model.model import Model, Positions
from meshwright.spec.model.rotary import Rotary
from meshwright.spec.model.token_mixers import AttentionSpec

DEFAULT_ROTARY = Rotary()
"""Rotary positions with the usual base of 10,000."""

RMS_NORM = NormSpec()
"""RMS norm with a guard of 1e-5."""


def build_decoder_model(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    vocab: int,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    experts: MoESpec | None = None,
    dense_layers: int = 0,
    rotary: Rotary | None = DEFAULT_ROTARY,
    tied: bool = False,
    max_positions: int = 4096,
    norm: NormSpec = RMS_NORM,
    family: str = "llama",
) -> Model:
    """Build a gated, bias-free, RMS-normed decoder (Llama's shape), dense or with experts.

    With `experts`, the first `dense_layers` layers keep the dense MLP of width `ffn`.
    """
    attention = AttentionSpec(
        heads=heads,
        kv_heads=kv_heads or heads,
        head_dim=head_dim or hidden // heads,
        rotary=rotary,
    )
    dense = BlockSpec(name="dense", mixer=attention, mlp=MLPSpec(width=ffn))
    blocks: tuple[BlockSpec, ...] = (dense,)
    pattern = f"{layers}*dense"
    if experts is not None:
        sparse = BlockSpec(name="moe", mixer=attention, mlp=experts)
        blocks = (dense, sparse) if dense_layers else (sparse,)
        pattern = f"{layers - dense_layers}*moe"
        pattern = f"{dense_layers}*dense {pattern}" if dense_layers else pattern
    return Model(
        name=name,
        family=family,
        hidden=hidden,
        vocab=vocab,
        blocks=blocks,
        pattern=pattern,
        norm=norm,
        tied=tied,
        max_positions=max_positions,
    )


def build_gpt(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    vocab: int,
    ffn: int | None = None,
    bias: bool = True,
    positions: Positions = "learned",
    max_positions: int = 2048,
    tied: bool = True,
    activation: Activation = "gelu",
    family: str = "gpt2",
) -> Model:
    """Build a GPT: plain MLP, layer norms, learned positions, tied head, biases everywhere."""
    attention = AttentionSpec(
        heads=heads, kv_heads=heads, head_dim=hidden // heads, qkv_bias=bias, out_bias=bias
    )
    mlp = MLPSpec(width=ffn or 4 * hidden, gated=False, activation=activation, bias=bias)
    return Model(
        name=name,
        family=family,
        hidden=hidden,
        vocab=vocab,
        blocks=(BlockSpec(name="dense", mixer=attention, mlp=mlp),),
        pattern=f"{layers}*dense",
        norm=NormSpec(kind="layer", bias=bias),
        tied=tied,
        positions=positions,
        max_positions=max_positions,
    )
