"""The tables of DeepSpeed's keys, and the reasons for what they cannot say.

Keys are those of deepspeed/runtime/config.py and constants.py, zero/config.py,
zero/offload_config.py, precision_config.py, activation_checkpointing/config.py,
tensor_parallel/config.py and module_inject/auto_ep_config.py (DeepSpeed, August 2026), with those
of zero/config.py from February 2025 that have gone since.
"""

import re

from meshwright.spec.bridge.export_report import NO_MODEL, Reasons

_KEYS = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
    zero_optimization.stage zero_optimization.overlap_comm zero_optimization.mics_shard_size
    zero_optimization.stage3_prefetch_bucket_size zero_optimization.prefetch_bucket_size
    zero_optimization.offload_optimizer.device zero_optimization.offload_optimizer.ratio
    zero_optimization.offload_param.device
    zero_optimization.cpu_offload zero_optimization.cpu_offload_param
    zero_optimization.zero_hpz_partition_size zero_optimization.zero_quantized_weights
    zero_optimization.zero_quantized_gradients zero_optimization
    bf16.enabled bf16.bf16_master_weights_and_grads bf16.bf16_optimizer_states bfloat16.enabled
    fp16.enabled fp16.fp16_master_weights_and_grads data_types.grad_accum_dtype
    optimizer.type zero_allow_untested_optimizer
    tensor_parallel.autotp_size tensor_parallel.tp_overlap_comm
    sequence_parallel_size data_parallel_size
    expert_parallel.enabled expert_parallel.autoep_size
    expert_parallel.expert_tensor_parallel_size
    pipeline.stages pipeline.activation_checkpoint_interval
    activation_checkpointing.cpu_checkpointing
"""
KEYS = tuple(_KEYS.split())
"""Keys that bear on a layout."""

# Sections that bear on a layout, with the keys in them that do not. A star marks a whole table.
_PASSED = {
    "zero_optimization": """
        contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce
        allgather_partitions allgather_bucket_size elastic_checkpoint zenflow.* sub_group_size
        cpu_offload_use_pin_memory stage3_param_persistence_threshold param_persistence_threshold
        stage3_model_persistence_threshold model_persistence_threshold stage3_max_live_parameters
        max_live_parameters stage3_max_reuse_distance max_reuse_distance
        stage3_gather_16bit_weights_on_model_save gather_16bit_weights_on_model_save
        stage3_gather_fp16_weights_on_model_save stage3_module_granularity_threshold
        module_granularity_threshold stage3_use_all_reduce_for_fetch_params
        use_all_reduce_for_fetch_params stage3_allgather_sequential allgather_sequential
        ignore_unused_parameters round_robin_gradients zero_quantized_nontrainable_weights
        zeropp_loco_param.* mics_hierarchical_params_gather memory_efficient_linear
        pipeline_loading_checkpoint override_module_apply log_trace_cache_warnings
        enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module.*
        load_from_fp32_weights legacy_stage1 grad_hooks""",
    "zero_optimization.offload_optimizer": """
        nvme_path buffer_count pin_memory pipeline pipeline_read pipeline_write fast_init
        super_offload cpuadam_cores_perc""",
    "zero_optimization.offload_param": "nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "bf16": "immediate_grad_update check_grad_overflow check_overflow auto_cast loss_scale",
    "bfloat16": "immediate_grad_update check_grad_overflow check_overflow",
    "fp16": """
        auto_cast loss_scale initial_scale_power loss_scale_window hysteresis
        consecutive_hysteresis min_loss_scale fp16_scale_tolerance""",
    "data_types": "param_dtype buffer_dtype",
    "optimizer": "params.* legacy_fusion",
    "activation_checkpointing": """
        partition_activations number_checkpoints contiguous_memory_optimization
        synchronize_checkpoint_boundary profile""",
    "pipeline": "partition seed_layers pipe_partitioned grad_partitioned use_reentrant",
    "tensor_parallel": """
        tp.* tensor_parallel.* tp_size tp_grain_size dtype injection_policy_tuple
        partition_config.* preset_model keep_module_on_host replace_with_kernel_inject
        kernel_inject""",
    "expert_parallel": """
        validate_folding_routing preset_model moe_layer_pattern expert_pattern router_pattern
        use_grouped_mm disable_triton_grouped_mm route_norm route_scale score_apply combine_impl
        num_expert_groups num_limited_groups score_func top_k load_balance_coeff
        routed_scaling_factor num_experts_attr top_k_attr has_shared_experts
        shared_experts_pattern shared_experts_gate_pattern expert_w1 expert_w2 expert_w3""",
}
_SECTIONS = """
    scheduler amp torch_autocast flops_profiler comms_logger comms_config tensorboard wandb
    csv_monitor comet monitor_config autotuning curriculum_learning data_efficiency
    progressive_layer_drop eigenvalue checkpoint aio nebula datastates elasticity
    compression_training quantize_training weight_quantization compile timers hybrid_engine
    sparse_attention train_args dist_init
"""
_ALONE = """
    steps_per_print wall_clock_breakdown memory_breakdown dump_state gradient_clipping
    prescale_gradients gradient_predivide_factor gradient_allreduce_op sparse_gradients
    communication_data_type seq_parallel_communication_data_type disable_allgather
    dataloader_drop_last log_level graph_harvesting zero_force_ds_cpu_optimizer
    use_data_before_expert_parallelism managed_gradient_accumulation vocabulary_size
    allgather_size ddp_bf16 data_parallel_group global_rank
"""


def _ignored() -> re.Pattern[str]:
    names = [f"{section}.{name}" for section, inside in _PASSED.items() for name in inside.split()]
    names += _ALONE.split()
    words = [re.escape(name).replace(r"\.\*", r"(?:\..*)?") for name in names]
    words += [rf"{section}(?:\..*)?" for section in _SECTIONS.split()]
    return re.compile("|".join(words))


IGNORED = _ignored()
"""Keys that DeepSpeed has and that have no bearing on a layout."""

TRAINER_ARGUMENTS = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_batch_size": "per_device_train_batch_size and gradient_accumulation_steps",
    "bf16.enabled": "bf16",
    "fp16.enabled": "fp16",
}
"""What Hugging Face's `Trainer` puts in the place of "auto" (`HfTrainerDeepSpeedConfig` in
src/transformers/integrations/deepspeed.py)."""

FILLED_FROM_MODEL = frozenset(
    {
        "zero_optimization.stage3_prefetch_bucket_size",
        "zero_optimization.prefetch_bucket_size",
    }
)
"""Keys whose "auto" becomes a multiple of the squared width of the model: prefetching is on."""

REASONS: Reasons = {
    "pp": ("the number of stages is an argument of PipelineModule", "pass num_stages"),
    "virtual_stages": ("its pipeline runs one chunk per rank", "use virtual_stages=1"),
    "schedule": ("its pipeline runs 1f1b", "use 1f1b"),
    "stage_layers": ("the split is an argument of PipelineModule", "pass partition_method"),
    "sequence_parallel": ("its tensor parallelism does not split the sequence", ""),
    "cp_kind": ("sequences are split by all-to-all over heads", "use ulysses"),
    "zero": ("a pipeline works with stages 0 and 1", "use zero=1"),
    "shard": ("hybrid sharding (MiCS) is for stage 3 without a pipeline", "use zero=3"),
    "expert_tp": ("without expert parallelism experts are cut like the rest", ""),
    "recompute": (
        "checkpointing is switched on in the model's code, or per layer in its pipeline",
        "enable checkpointing in the model"),
    "recompute_ops": ("checkpointing is switched on in the model's code", ""),
    "recompute_layers": ("checkpointing is switched on in the model's code", ""),
    "precision": ("bf16, fp16 and fp32 are there", "use bf16"),
    "master_precision": (
        "copies are fp32, or the dtype of the weights with ZeRO", "use fp32"),
    "gradient_precision": (
        "gradients are summed in fp32 or the dtype of the weights, and only the latter without "
        "ZeRO", "use zero of at least 1"),
    "moment_precision": ("moments are fp32, or bf16 with a bf16 copy of the weights", "use fp32"),
    "overlap_gradients": ("without ZeRO gradients are reduced after backward", "use zero=1"),
    "overlap_parameters": ("only stage 3 gathers parameters ahead", "use zero=3"),
    "overlap_pp": ("its pipeline does not overlap sends", ""),
    "overlap_ep": ("the experts' all-to-all is not hidden", ""),
    "offload": (
        "the optimizer goes to the host together with the gradients (with ZeRO), parameters in "
        "stage 3, activations where they are checkpointed", ""),
    "offload_layers": ("checkpointed activations are offloaded in every layer", "leave it out"),
    "order": ("ranks are ordered tp-cp-ep-dp-pp", "use that order"),
    "dp": ("it follows from the number of processes", "start as many processes"),
    "sequence_length": ("the data decide it", ""),
    "model": (NO_MODEL, "build the model in code"),
}  # fmt: skip
"""Why DeepSpeed cannot say a field, and what to do."""
