"""The table of torchtitan's keys: those that are read, and those that have no bearing here.

Sections and keys are those of `JobConfig` in torchtitan/config/job_config.py, torchtitan 0.2.2.
"""

import re

_KEYS = """
    parallelism.data_parallel_replicate_degree parallelism.data_parallel_shard_degree
    parallelism.fsdp_reshard_after_forward parallelism.tensor_parallel_degree
    parallelism.enable_sequence_parallel parallelism.enable_async_tensor_parallel
    compile.enable_async_tensor_parallel compile.enable compile.components
    parallelism.pipeline_parallel_degree parallelism.pipeline_parallel_schedule
    parallelism.pipeline_parallel_microbatch_size parallelism.module_fqns_per_model_part
    parallelism.pipeline_parallel_first_stage_less_layers
    parallelism.pipeline_parallel_last_stage_less_layers
    parallelism.pipeline_parallel_layers_per_stage
    parallelism.pipeline_parallel_expert_parallel_overlap
    parallelism.context_parallel_degree parallelism.context_parallel_rotate_method
    parallelism.expert_parallel_degree parallelism.expert_tensor_parallel_degree
    training.local_batch_size training.global_batch_size training.seq_len training.dtype
    training.mixed_precision_param training.enable_cpu_offload
    activation_checkpoint.mode activation_checkpoint.selective_ac_option
    model.name model.flavor model.converters
    quantize.linear.float8.recipe_name quantize.linear.mx.recipe_name
    optimizer.name
"""
KEYS = tuple(_KEYS.split())
IGNORED = re.compile(
    r"(?:job|profiling|metrics|lr_scheduler|checkpoint|comm|memory_estimation|fault_tolerance|"
    r"validation|debug|experimental|quantize|compile)(?:\..*)?"
    r"|optimizer\.(?:lr|beta1|beta2|eps|weight_decay|implementation|early_step_in_backward)"
    r"|training\.(?:dataset|dataset_path|max_norm|steps|mixed_precision_reduce|gc_freq|gc_debug|"
    r"dataloader.*|deterministic|seed)"
    r"|model\.(?:hf_assets_path|tokenizer_path|print_after_conversion)"
    r"|activation_checkpoint\.(?:per_op_\w+|early_stop|memory_budget|visualize_\w+|"
    r"preserve_rng_state|determinism_check|debug)"
    r"|parallelism\.(?:disable_loss_parallel|pipeline_parallel_schedule_csv|"
    r"context_parallel_load_balancer|expert_parallel_comm_backend|spmd_backend|"
    r"enable_fsdp_symm_mem)"
)
