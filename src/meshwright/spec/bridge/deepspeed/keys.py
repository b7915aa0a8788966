"""The table of DeepSpeed's keys, and the reasons for what they cannot say.

Keys are those of deepspeed/runtime/config.py, zero/config.py, precision_config.py,
tensor_parallel/config.py and module_inject/auto_ep_config.py (DeepSpeed, August 2026).
"""

import re

from meshwright.spec.bridge.report import NO_MODEL, Reasons

_KEYS = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
    zero_optimization.stage zero_optimization.overlap_comm zero_optimization.mics_shard_size
    zero_optimization.stage3_prefetch_bucket_size zero_optimization.prefetch_bucket_size
    zero_optimization.offload_optimizer.device zero_optimization.offload_param.device
    zero_optimization.cpu_offload zero_optimization.zero_hpz_partition_size zero_optimization
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
IGNORED = re.compile(
    r"(?:optimizer\.(?:params.*|legacy_fusion)|scheduler.*|steps_per_print|wall_clock_breakdown|"
    r"dump_state|gradient_clipping|prescale_gradients|gradient_predivide_factor|sparse_gradients|"
    r"sparse_attention.*|communication_data_type|seq_parallel_communication_data_type|amp.*|"
    r"disable_allgather|memory_breakdown|flops_profiler.*|comms_logger.*|tensorboard.*|wandb.*|"
    r"csv_monitor.*|comet.*|monitor_config.*|autotuning.*|curriculum_learning.*|data_efficiency.*|"
    r"progressive_layer_drop.*|eigenvalue.*|checkpoint.*|aio.*|nebula.*|datastates.*|elasticity.*|"
    r"compression_training.*|quantize_training.*|weight_quantization.*|compile.*|timers.*|"
    r"dataloader_drop_last|log_level|hybrid_engine.*|torch_autocast.*|graph_harvesting|"
    r"zero_force_ds_cpu_optimizer|use_data_before_expert_parallelism|gradient_allreduce_op|"
    r"managed_gradient_accumulation|vocabulary_size|train_args.*|dist_init.*)"
    r"|zero_optimization\..*|(?:bf16|bfloat16|fp16|data_types|tensor_parallel|expert_parallel|"
    r"pipeline|activation_checkpointing)\..*"
)
NEIGHBOURS = frozenset(
    {
        "zero_optimization.zero_quantized_weights",
        "zero_optimization.offload_optimizer.device_id",
        "zero_optimization.stage3_max_reuse_distance",
    }
)

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
        "copies are fp32, or the format of the weights with ZeRO", "use fp32"),
    "gradient_precision": (
        "gradients are summed in fp32 or the format of the weights, and only the latter without "
        "ZeRO", "use zero of at least 1"),
    "moment_precision": ("moments are fp32, or bf16 with a bf16 copy of the weights", "use fp32"),
    "overlap_gradients": ("without ZeRO gradients are reduced after backward", "use zero=1"),
    "overlap_parameters": ("only stage 3 gathers parameters ahead", "use zero=3"),
    "overlap_pp": ("its pipeline does not overlap sends", ""),
    "overlap_ep": ("the experts' all-to-all is not hidden", ""),
    "offload": (
        "the optimizer goes to the host together with the gradients (with ZeRO), parameters in "
        "stage 3, activations where they are checkpointed", ""),
    "order": ("ranks are ordered tp-cp-ep-dp-pp", "use that order"),
    "dp": ("it follows from the number of processes", "start as many processes"),
    "sequence_length": ("the data decide it", ""),
    "model": (NO_MODEL, "build the model in code"),
}  # fmt: skip
"""Why DeepSpeed cannot say a field, and what to do."""
