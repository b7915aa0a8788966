"""The table of Megatron-Bridge's recipe fields: where each Megatron-Core setting stands.

Sections and fields are those of `ConfigContainer` in src/megatron/bridge/training/config.py and of
`GPTModelProvider` in src/megatron/bridge/models/gpt_provider.py (Megatron-Bridge, August 2026).
"""

import re

from meshwright.spec.bridge.mcore import layout_config

_ELSEWHERE = {
    "ddp": """
        num_distributed_optimizer_instances use_megatron_fsdp data_parallel_sharding_strategy
        use_distributed_optimizer overlap_grad_reduce overlap_param_gather grad_reduce_in_fp32""",
    "optimizer": """
        optimizer use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype
        exp_avg_sq_dtype optimizer_cpu_offload optimizer_offload_fraction""",
    "dist": "use_tp_pp_dp_mapping use_torch_fsdp2",
    "train": "micro_batch_size global_batch_size rampup_batch_size step_batch_size_schedule",
    "checkpoint": "ckpt_format",
    "mixed_precision": "bf16 fp16 fp8 fp8_recipe fp4 fp4_recipe",
}
_RENAMED = {
    "seq_length": "dataset.seq_length",
    "num_experts": "model.num_moe_experts",
    "norm_epsilon": "model.layernorm_epsilon",
    "apply_layernorm_1p": "model.layernorm_zero_centered_gamma",
    "pad_vocab": "model.should_pad_vocab",
    "rotary_seq_len_interpolation_factor": "model.seq_len_interpolation_factor",
    "use_rope_scaling": "model.rope_scaling",
    "max_position_embeddings": "model.seq_length",
    "untie_embeddings_and_output_weights": "model.share_embeddings_and_output_weights",
}
# Settings of the command line that a recipe has no field for.
_NO_FIELD = frozenset(
    {
        "group_query_attention",
        "moe_layer_recompute",
        "num_layers_per_virtual_pipeline_stage",
        "padded_vocab_size",
        "recompute_activations",
        "torch_fsdp2_reshard_after_forward",
        "use_rotary_position_embeddings",
    }
)


def _paths() -> dict[str, str]:
    section = {name: part for part, names in _ELSEWHERE.items() for name in names.split()}
    return {
        name: _RENAMED.get(name, f"{section.get(name, 'model')}.{name}")
        for name in layout_config.SETTINGS
        if name not in _NO_FIELD
    }


PATHS = _paths()
"""Setting → dotted path in a recipe."""

_NULLABLE = """
    expert_tensor_parallel_size hierarchical_context_parallel_sizes linear_attention_freq
    moe_latent_size moe_router_group_topk moe_router_num_groups moe_router_topk_scaling_factor
    moe_shared_expert_intermediate_size mtp_num_layers no_rope_freq num_experts num_query_groups
    pipeline_model_parallel_layout q_lora_rank recompute_granularity recompute_method
    recompute_modules recompute_num_layers rotary_seq_len_interpolation_factor softmax_scale
    virtual_pipeline_model_parallel_size window_attn_skip_freq window_size
"""
NULLABLE = frozenset(_NULLABLE.split())
"""Settings that are switched off by writing null; others without a value are left out."""

LISTS = ("moe_layer_freq", "linear_attention_freq", "window_attn_skip_freq", "no_rope_freq")
"""Settings that are an expression on the command line and a list of marks in a recipe."""

INVERTED = frozenset({"untie_embeddings_and_output_weights"})
"""Settings whose field says the opposite."""

YARN_PATHS = {
    "rotary_scaling_factor": "model.yarn_rotary_scaling_factor",
    "mscale": "model.yarn_mscale",
    "mscale_all_dim": "model.yarn_mscale_all_dim",
}
"""Where ordinary attention keeps what latent attention keeps without the prefix."""

OVERLAP_PATHS = {
    "tp_comm_overlap": "comm_overlap.tp_comm_overlap",
    "overlap_p2p_comm": "comm_overlap.overlap_p2p_comm",
    "overlap_grad_reduce": "comm_overlap.overlap_grad_reduce",
    "overlap_param_gather": "comm_overlap.overlap_param_gather",
    "overlap_moe_expert_parallel_comm": "comm_overlap.overlap_moe_expert_parallel_comm",
}
"""Where a recipe's overlap section overrides the fields of model and ddp."""

RECIPES: dict[str, dict[str, object]] = {
    "bf16_mixed": {"bf16": True},
    "fp16_mixed": {"fp16": True, "grad_reduce_in_fp32": False},
    "bf16_with_fp8_delayed_scaling_mixed": {"bf16": True, "fp8": "hybrid", "fp8_recipe": "delayed"},
    "bf16_with_fp8_current_scaling_mixed": {
        "bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True},
    "bf16_with_fp8_subchannel_scaling_mixed": {
        "bf16": True, "fp8": "hybrid", "fp8_recipe": "blockwise"},
    "bf16_with_mxfp8_mixed": {"bf16": True, "fp8": "e4m3", "fp8_recipe": "mxfp8"},
    "bf16_with_nvfp4_mixed": {"bf16": True, "fp4": "e2m1", "fp4_recipe": "nvfp4"},
}  # fmt: skip
"""The named precisions of src/megatron/bridge/training/mixed_precision.py that can be held."""

MIXED_PRECISION = "megatron.bridge.training.mixed_precision.MixedPrecisionConfig"

# What src/megatron/bridge/recipes/common.py (`_pretrain_common`) sets, which a file of overrides
# leaves as it is.
RECIPE_DEFAULTS: dict[str, object] = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}

IGNORED = re.compile(
    r"(?:logger|checkpoint|scheduler|tokenizer|rng|rerun_state_machine|validation|ft|straggler|"
    r"nvrx_straggler|profiling|peft|tensor_inspect|inprocess_restart|env_vars|dataset|train|dist|"
    r"optimizer_config_override_provider|_\w+_)(?:\..*)?"
    r"|(?:model|ddp|optimizer|mixed_precision|comm_overlap)\.[\w.]+"
    r"|comm_overlap|mixed_precision"
)
"""Whole sections about other things, and fields of the rest that have no bearing."""

NEIGHBOURS = frozenset(
    {
        "mixed_precision.fp32",
        "model.tp_comm_overlap_ag",
        "model.tp_comm_overlap_cfg",
        "model.tp_comm_overlap_rs",
    }
)
"""Real fields whose names come close to those of the table."""
