"""`DecoderTraits`: what sets one family of decoders apart, as data that one reader and writer obey.

A family names its keys where they differ from Llama's, the defaults its config class falls back
to, and the switches that are fixed in its code. Figures are the defaults of the config classes of
transformers 4 and 5, which agree unless a comment says otherwise.
"""

from typing import Any, Literal, NamedTuple

import msgspec

from meshwright.spec.model.block import NormPosition, NormSpec
from meshwright.spec.model.feedforward import Activation, RouterBias, Scoring
from meshwright.spec.model.huggingface.config_fields import MissingKey
from meshwright.spec.model.model import Positions
from meshwright.spec.model.token_mixers import QkNorm


class ConfigFlag(NamedTuple):
    """A switch that a config sets under a key, with the class's default."""

    key: str
    default: bool = False


FlagOrBool = bool | ConfigFlag
"""A trait of the family's code, or a switch of its config."""

LayerTypeRule = Literal["full", "window", "switch", "upper", "alternate", "types"]
"""Which layers stay within `sliding_window`: none; all; all once `use_sliding_window` is set, or
those from `max_window_layers` on, or every second one below it; those that `layer_types` says."""

MoELayerRule = Literal["all", "first", "step", "interleave"]
"""Which layers have experts: all, those from `first_k_dense_replace`, every `decoder_sparse_step`
but `mlp_only_layers`, or every `interleave_moe_layer_step` unless `moe_layers` lists them."""


class SizeKeys(msgspec.Struct, frozen=True, kw_only=True):
    """What a family calls the sizes."""

    hidden: str = "hidden_size"
    layers: str = "num_hidden_layers"
    heads: str = "num_attention_heads"
    kv_heads: str = "num_key_value_heads"
    head_dim: str = "head_dim"
    ffn: str = "intermediate_size"
    vocab: str = "vocab_size"
    positions: str = "max_position_embeddings"
    eps: str = "rms_norm_eps"
    activation: str = "hidden_act"
    tied: str = "tie_word_embeddings"
    theta: str = "rope_theta"
    fraction: str = "partial_rotary_factor"
    ffn_ratio: str = ""
    """The inner width as a multiple of the width, for families that tell it so."""


class RouterKeys(msgspec.Struct, frozen=True, kw_only=True):
    """How a family's experts are told; an empty key means that the family has no such setting."""

    layers: MoELayerRule = "all"
    """Which layers have experts."""
    dense_first: int = 0
    """Default of `first_k_dense_replace`."""
    count: tuple[str, int] = ("num_local_experts|num_experts", 8)
    """Key and default of the number of experts."""
    top_k: tuple[str, int | MissingKey] = ("num_experts_per_tok", 2)
    """Key and default of the experts per token."""
    width: tuple[str, int] = ("intermediate_size", 14336)
    """Key and default of an expert's width."""
    shared_width: tuple[str, int] = ("", 0)
    """Key and default of the width of all shared experts."""
    shared_count: tuple[str, int] = ("", 0)
    """Key and default of the number of shared experts, each as wide as a routed one."""
    dense_key: str = "intermediate_size"
    """Key of the width of the layers without experts."""
    shared_gate: bool = False
    bias: bool = False
    router_bias: RouterBias = "none"
    scoring: Scoring = "softmax"
    scoring_key: str = ""
    activation: Activation | None = None
    """An activation fixed in the family's code; None takes that of the config."""
    method_key: str = ""
    """DeepSeek-V2: a word that says whether experts are picked by groups."""
    normalise: FlagOrBool = True
    scale: tuple[str, float] = ("", 1.0)
    groups: tuple[int, int] | None = None
    """Defaults of `n_group` and `topk_group`; None for a family that does not group experts."""


class LinearAttentionDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """Defaults of the gated delta-rule layers of a hybrid family."""

    interval: int = 4
    """Every so many layers one has full attention."""


class DecoderTraits(msgspec.Struct, frozen=True, kw_only=True):
    """One family of decoders."""

    model_type: str
    architecture: str
    """The class name that a config lists under `architectures`."""
    hidden: int = 4096
    layers: int = 32
    heads: int = 32
    kv_heads: int | None = None
    """None is as many as `heads`."""
    head_dim: int | None = None
    """None is `hidden / heads`."""
    ffn: int | None = 11008
    """None is four times `hidden`."""
    vocab: int = 32000
    max_positions: int = 2048
    eps: float = 1e-6
    tied: bool = False
    keys: SizeKeys = SizeKeys()

    norm: NormSpec = NormSpec()
    norm_position: NormPosition = "pre"
    parallel: tuple[ConfigFlag, NormPosition] | None = None
    """A switch that puts attention and MLP side by side, and where the norms stand then."""
    embedding_norm: bool = False
    qkv_bias: FlagOrBool = False
    out_bias: FlagOrBool = False
    mlp_bias: FlagOrBool = False
    head_bias: FlagOrBool = False
    gated: bool = True
    activation: str = "silu"
    """Default of the activation key, in the config's words."""
    qk_norm: QkNorm = "none"
    qk_norm_flag: ConfigFlag | None = None
    """A switch that turns `qk_norm` on; None where it is always on."""

    positions: Positions = "rotary"
    position_offset: int = 0
    theta: float = 10000.0
    fraction: float | None = None
    """Default of `partial_rotary_factor`; None for families without the key."""
    interleaved: FlagOrBool = False
    scaling: dict[str, Any] = {}
    """Default of `rope_scaling`."""
    local_theta: float | None = None
    """Default of `rope_local_base_freq`, for families whose windowed layers have their own."""
    unscaled_local_rope: bool = False
    """Windowed layers do not stretch their rotary embedding."""
    global_rotary: bool = True
    """Layers that see everything have a rotary embedding as well."""

    layer_type_rule: LayerTypeRule = "full"
    window: int | None = None
    """Default of `sliding_window`."""
    period: int = 0
    """Default of `layer_types`: every so many layers one sees everything."""
    chunked: bool = False
    """Llama 4: local layers are chunked, global ones have a temperature."""
    latent: bool = False
    """DeepSeek: multi-head latent attention."""
    q_rank: int | None = None
    """Default of `q_lora_rank`."""
    linear: LinearAttentionDefaults | None = None
    """Qwen3-Next: most layers are gated delta-rule layers."""
    gate: bool = False
    sinks: bool = False
    clip_key: str = ""
    scale_key: str = ""
    """Key of the multiplier of scores."""
    scalar_key: str = ""
    """Key of the number whose inverse square root multiplies scores, not that of the head width."""
    softcap: tuple[str, float | None] = ("", None)

    sqrt_embedding: bool = False
    """Embeddings are multiplied by the square root of the width."""
    embedding_scale_key: str = ""
    logit_scale: tuple[str, float | None] = ("", None)
    logit_softcap: tuple[str, float | None] = ("", None)
    routing: RouterKeys | None = None
    multi_token: int | None = None
    """Default of `num_nextn_predict_layers`; None for families without the key."""
    fixed: dict[str, Any] = {}
    """Keys that have one value in every model that is understood; they are written as well."""
    same_as_hidden: str = ""
    """A key that must equal the width."""
