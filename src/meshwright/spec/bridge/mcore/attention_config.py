"""Attention, latent attention, gated delta and Mamba in Megatron-Core's settings."""

from typing import Any

from meshwright.errors import InputError
from meshwright.spec.bridge.framework_config import FrameworkConfig
from meshwright.spec.model.rotary import Rotary
from meshwright.spec.model.token_mixers import (
    AttentionSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mamba2Spec,
    QkNorm,
)

SETTINGS = (
    "num_attention_heads",
    "group_query_attention",
    "num_query_groups",
    "kv_channels",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "qk_l2_norm",
    "window_size",
    "softmax_type",
    "softmax_scale",
    "attention_output_gate",
    "multi_latent_attention",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "experimental_attention_variant",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "mamba_num_heads",
    "mamba_head_dim",
    "mamba_state_dim",
    "mamba_num_groups",
)


def write_attention(attention: AttentionSpec, window: int | None) -> dict[str, Any]:
    """Return the settings of ordinary attention; `window` is that of the windowed layers."""
    grouped = attention.kv_heads != attention.heads
    return {
        "num_attention_heads": attention.heads,
        "group_query_attention": grouped,
        "num_query_groups": attention.kv_heads if grouped else None,
        "kv_channels": attention.head_dim,
        "add_qkv_bias": attention.qkv_bias,
        "qk_layernorm": attention.qk_norm == "head",
        "qk_l2_norm": attention.qk_norm == "l2",
        # A window of W positions, the token's own included, looks W - 1 back.
        "window_size": None if window is None else [window - 1, 0],
        "softmax_type": "learnable" if attention.sinks else None,
        "softmax_scale": attention.scale,
        "attention_output_gate": attention.gate,
        "multi_latent_attention": False,
    }


def write_mla(latent: LatentAttentionSpec) -> dict[str, Any]:
    """Return the settings of latent attention; its norms of the latents are a switch there."""
    return {
        "num_attention_heads": latent.heads,
        "kv_channels": latent.value_dim,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_head_dim": latent.nope_dim,
        "qk_pos_emb_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
    }


def write_gated_delta_net(delta: GatedDeltaNetSpec) -> dict[str, Any]:
    """Return the settings of gated delta layers."""
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_conv_kernel_dim": delta.conv_width,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
    }


def write_mamba(mamba: Mamba2Spec) -> dict[str, Any]:
    """Return the settings of Mamba layers."""
    return {
        "mamba_num_heads": mamba.heads,
        "mamba_head_dim": mamba.head_dim,
        "mamba_state_dim": mamba.state_dim,
        "mamba_num_groups": mamba.groups,
    }


def read_attention(
    settings: FrameworkConfig, hidden: int, rotary: Rotary | None, windowed: bool
) -> AttentionSpec | None:
    """Return one attention layer, with its window or without."""
    heads = settings.integer("num_attention_heads", 1)
    groups = settings.integer("num_query_groups", 1)
    # Bridge recipes give the groups alone; the flags need the switch as well.
    grouped = settings.flag("group_query_attention", settings.has("num_query_groups"))
    head_dim = settings.optional_integer("kv_channels")
    if head_dim is None:
        if hidden % heads:
            settings.add_problem(
                "num_attention_heads",
                f"{heads} does not divide the width {hidden}",
                f"give {settings.label('kv_channels')}",
            )
            return None
        head_dim = hidden // heads
    biased = settings.flag("add_bias_linear", True)
    norm: QkNorm = "head" if settings.flag("qk_layernorm") else "none"
    try:
        return AttentionSpec(
            heads=heads,
            kv_heads=groups if grouped else heads,
            head_dim=head_dim,
            qkv_bias=biased or settings.flag("add_qkv_bias"),
            out_bias=biased,
            qk_norm="l2" if settings.flag("qk_l2_norm") else norm,
            window=_window(settings) if windowed else None,
            rotary=rotary,
            sinks=_sinks(settings),
            gate=settings.flag("attention_output_gate"),
            scale=settings.optional_number("softmax_scale"),
        )
    except InputError as error:
        for problem in error.problems:
            settings.add_problem("num_query_groups", problem.what, problem.fix)
        return None


def _window(settings: FrameworkConfig) -> int | None:
    value = settings.raw("window_size")
    if isinstance(value, str):
        value = [part for part in value.strip("()[] ").split(",") if part.strip()]
    try:
        back, ahead = (int(part) for part in value or ())
    except (TypeError, ValueError):
        settings.add_problem("window_size", f"{value!r} is not a pair of numbers", "write 4095,0")
        return None
    if ahead != 0:
        settings.add_note("window_size", f"looks {ahead} positions ahead, which is not held")
    return back + 1 if back >= 0 else None


def _sinks(settings: FrameworkConfig) -> bool:
    kinds = {"vanilla": "vanilla", "learnable": "learnable", "off-by-one": "off-by-one"}
    kind = settings.choice("softmax_type", kinds, "vanilla")
    if kind == "off-by-one":
        settings.add_note("softmax_type", "a fixed sink cannot be held; none is read")
    return kind == "learnable"


def read_mla(settings: FrameworkConfig, rotary: Rotary | None) -> LatentAttentionSpec:
    """Return one latent attention layer."""
    if not settings.flag("qk_layernorm"):
        settings.add_note(
            "multi_latent_attention", "without norms of the latents cannot be held; they are read",
            f"add {settings.label('qk_layernorm')}",
        )  # fmt: skip
    if settings.flag("add_bias_linear", True):
        settings.add_note("add_bias_linear", "a bias on the output GEMM alone cannot be held")
    # Defaults of megatron/training/arguments.py, `_add_mla_args`.
    return LatentAttentionSpec(
        heads=settings.integer("num_attention_heads", 1),
        q_rank=settings.optional_integer("q_lora_rank"),
        kv_rank=settings.integer("kv_lora_rank", 32),
        nope_dim=settings.integer("qk_head_dim", 128),
        rope_dim=settings.integer("qk_pos_emb_head_dim", 64),
        value_dim=settings.integer("v_head_dim", 128),
        rotary=rotary,
    )


def read_gated_delta_net(settings: FrameworkConfig) -> GatedDeltaNetSpec:
    """Return one gated delta layer."""
    return GatedDeltaNetSpec(
        key_heads=settings.integer("linear_num_key_heads", 16),
        value_heads=settings.integer("linear_num_value_heads", 32),
        key_dim=settings.integer("linear_key_head_dim", 128),
        value_dim=settings.integer("linear_value_head_dim", 128),
        conv_width=settings.integer("linear_conv_kernel_dim", 4),
    )


def read_mamba(settings: FrameworkConfig, hidden: int) -> Mamba2Spec:
    """Return one Mamba layer."""
    head_dim = settings.integer("mamba_head_dim", 64)
    # megatron/core/ssm/mamba_mixer.py: twice the model's width where no head count is given.
    heads = settings.integer("mamba_num_heads", max(1, 2 * hidden // head_dim))
    return Mamba2Spec(
        heads=heads,
        head_dim=head_dim,
        state_dim=settings.integer("mamba_state_dim", 128),
        groups=settings.integer("mamba_num_groups", 8),
    )
