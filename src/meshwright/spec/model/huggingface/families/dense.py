"""Families of dense decoders with rotary positions, from Llama to Phi, as traits."""

from msgspec.structs import replace

from meshwright.spec.model.block import NormSpec
from meshwright.spec.model.huggingface.family_traits import ConfigFlag, DecoderTraits, SizeKeys

_BIAS = ConfigFlag("attention_bias", False)

_GEMMA = DecoderTraits(
    model_type="gemma",
    architecture="GemmaForCausalLM",
    hidden=3072, layers=28, heads=16, kv_heads=16, head_dim=256, ffn=24576, vocab=256000,
    max_positions=8192, tied=True,
    # Early configs say hidden_act="gelu" and mean the tanh form, as hidden_activation says.
    keys=SizeKeys(activation="hidden_activation"),
    norm=NormSpec(unit_offset=True),
    qkv_bias=_BIAS, out_bias=_BIAS,
    activation="gelu_pytorch_tanh",
    sqrt_embedding=True,
)  # fmt: skip

_GEMMA2 = replace(
    _GEMMA,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    hidden=2304, layers=26, heads=8, kv_heads=4, ffn=9216,
    norm_position="sandwich",
    layer_type_rule="types", period=2, window=4096,
    scalar_key="query_pre_attn_scalar",
    softcap=("attn_logit_softcapping", 50.0),
    logit_softcap=("final_logit_softcapping", 30.0),
)  # fmt: skip

GEMMA3_TEXT = replace(
    _GEMMA2,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    vocab=262208, max_positions=131072,
    qk_norm="head",
    theta=1_000_000.0, local_theta=10_000.0, unscaled_local_rope=True,
    period=6,
    softcap=("attn_logit_softcapping", None),
    logit_softcap=("final_logit_softcapping", None),
    fixed={"use_bidirectional_attention": False},
)  # fmt: skip

LLAMA = DecoderTraits(
    model_type="llama",
    architecture="LlamaForCausalLM",
    qkv_bias=_BIAS, out_bias=_BIAS, mlp_bias=ConfigFlag("mlp_bias"),
)  # fmt: skip

QWEN2 = DecoderTraits(
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    ffn=22016, vocab=151936, max_positions=32768,
    qkv_bias=True,
    layer_type_rule="upper", window=4096,
)  # fmt: skip

_OLMO = DecoderTraits(
    model_type="olmo",
    architecture="OlmoForCausalLM",
    vocab=50304, eps=1e-5,
    keys=SizeKeys(eps=""),
    norm=NormSpec(kind="layer-plain"),
    qkv_bias=_BIAS, out_bias=_BIAS,
    clip_key="clip_qkv",
)  # fmt: skip

_OLMO2 = replace(
    _OLMO,
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    keys=SizeKeys(),
    norm=NormSpec(),
    norm_position="post",
    qk_norm="full",
    clip_key="",
)

DENSE = (
    LLAMA,
    DecoderTraits(
        model_type="mistral",
        architecture="MistralForCausalLM",
        kv_heads=8, ffn=14336, max_positions=131072,
        layer_type_rule="window", window=4096,
    ),
    QWEN2,
    replace(
        QWEN2,
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        head_dim=128,
        qkv_bias=_BIAS, out_bias=_BIAS,
        qk_norm="head",
    ),
    _GEMMA,
    _GEMMA2,
    GEMMA3_TEXT,
    _OLMO,
    _OLMO2,
    replace(
        _OLMO2,
        model_type="olmo3",
        architecture="Olmo3ForCausalLM",
        layer_type_rule="types", period=4, window=4096,
        theta=500_000.0, unscaled_local_rope=True,
    ),
    DecoderTraits(
        model_type="phi",
        architecture="PhiForCausalLM",
        hidden=2048, layers=24, ffn=8192, vocab=51200, eps=1e-5,
        keys=SizeKeys(eps="layer_norm_eps"),
        norm=NormSpec(kind="layer", bias=True),
        norm_position="parallel-shared",
        qkv_bias=True, out_bias=True, mlp_bias=True, head_bias=True,
        gated=False, activation="gelu_new",
        fraction=0.5,
        fixed={"qk_layernorm": False},
    ),
    DecoderTraits(
        model_type="phi3",
        architecture="Phi3ForCausalLM",
        hidden=3072, ffn=8192, vocab=32064, max_positions=4096, eps=1e-5,
        fraction=1.0,
        layer_type_rule="window",
        fixed={"attention_bias": False},
    ),
    DecoderTraits(
        model_type="nemotron",
        architecture="NemotronForCausalLM",
        hidden=6144, heads=48, ffn=24576, vocab=256000, max_positions=4096, eps=1e-5,
        keys=SizeKeys(eps="norm_eps", fraction="partial_rotary_factor|rope_percent"),
        norm=NormSpec(kind="layer", bias=True, unit_offset=True),
        qkv_bias=_BIAS, out_bias=_BIAS, mlp_bias=ConfigFlag("mlp_bias"),
        gated=False, activation="relu2",
        fraction=0.5,
    ),
    DecoderTraits(
        model_type="starcoder2",
        architecture="Starcoder2ForCausalLM",
        hidden=3072, layers=30, heads=24, kv_heads=2, ffn=12288, vocab=49152, max_positions=4096,
        eps=1e-5, tied=True,
        keys=SizeKeys(eps="norm_epsilon"),
        norm=NormSpec(kind="layer", bias=True),
        qkv_bias=ConfigFlag("use_bias", True), out_bias=ConfigFlag("use_bias", True),
        mlp_bias=ConfigFlag("use_bias", True),
        gated=False, activation="gelu_pytorch_tanh",
        layer_type_rule="window",
    ),
    DecoderTraits(
        model_type="internlm2",
        architecture="InternLM2ForCausalLM",
        vocab=103168,
        qkv_bias=ConfigFlag("bias", True), out_bias=ConfigFlag("bias", True),
    ),
    DecoderTraits(
        model_type="internlm",
        architecture="InternLMForCausalLM",
        vocab=103168,
        qkv_bias=ConfigFlag("bias", True), out_bias=ConfigFlag("bias", True),
    ),
    DecoderTraits(
        model_type="cohere",
        architecture="CohereForCausalLM",
        hidden=8192, layers=40, heads=64, ffn=22528, vocab=256000, max_positions=8192, eps=1e-5,
        tied=True,
        keys=SizeKeys(eps="layer_norm_eps"),
        norm=NormSpec(kind="layer"),
        norm_position="parallel-shared",
        qkv_bias=_BIAS, out_bias=_BIAS,
        interleaved=True,
        logit_scale=("logit_scale", 0.0625),
        fixed={"use_qk_norm": False},
    ),
    DecoderTraits(
        model_type="stablelm",
        architecture="StableLmForCausalLM",
        hidden=2560, ffn=6912, vocab=50304, max_positions=4096, eps=1e-5,
        keys=SizeKeys(eps="layer_norm_eps"),
        norm=NormSpec(kind="layer", bias=True),
        parallel=(ConfigFlag("use_parallel_residual"), "parallel-shared"),
        qkv_bias=ConfigFlag("use_qkv_bias"),
        fraction=0.25,
        fixed={"qk_layernorm": False},
    ),
)  # fmt: skip
