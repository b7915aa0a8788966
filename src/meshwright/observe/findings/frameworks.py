"""Trainers and serving engines: which one a trace shows, and the settings that mend it there."""

import re
from collections.abc import Iterable

_TRAINERS = (
    ("Megatron", re.compile(r"\bmegatron[/.]")),
    ("DeepSpeed", re.compile(r"\bdeepspeed[/.]|\bDeepSpeed(Engine|Zero)")),
    ("FSDP1", re.compile(r"^FullyShardedDataParallel\.")),
    ("FSDP2", re.compile(r"^FSDP::")),
    ("DDP", re.compile(r"^DistributedDataParallel\.forward")),
)
_ENGINES = (
    ("SGLang", re.compile(r"\bsglang\b|\bsgl_kernel\b|sgl-workspace")),
    ("vLLM", re.compile(r"\bvllm(::|/|\.|_C\b)|^vllm\b")),
)
"""How their annotations, Python files, operators and kernels are called; the first that shows.

Trainers build on those below them; SGLang may load parts of vLLM.
"""
FRAMEWORK_REMEDIES = {
    "DDP": {
        "exposed-all-reduce": "DistributedDataParallel(bucket_cap_mb=100) for fewer buckets, or "
        "10 for an earlier start, gradient_as_bucket_view=True, static_graph=True; accumulate "
        "with model.no_sync()",
        "small-collectives": "DistributedDataParallel(bucket_cap_mb=25) or more",
        "buffer-broadcast": "DistributedDataParallel(broadcast_buffers=False), or SyncBatchNorm",
        "fp32-reduction": "model.register_comm_hook(None, default_hooks.bf16_compress_hook); check "
        "the loss",
        "device-to-device-copies": "DistributedDataParallel(gradient_as_bucket_view=True); drop "
        ".clone() and "
        ".contiguous()",
    },
    "FSDP2": {
        "exposed-all-gather": "module.set_modules_to_forward_prefetch([...]) and "
        "set_modules_to_backward_prefetch([...]); fully_shard(reshard_after_forward=False) where "
        "memory allows",
        "exposed-reduce-scatter": "larger units (fully_shard on several layers at once); "
        "accumulate with set_requires_gradient_sync(False)",
        "small-collectives": "larger units: fully_shard on several layers at once",
        "fp32-reduction": "MixedPrecisionPolicy(reduce_dtype=torch.bfloat16); check the loss",
    },
    "FSDP1": {
        "exposed-all-gather": "forward_prefetch=True, BackwardPrefetch.BACKWARD_PRE, "
        "limit_all_gathers=False; ShardingStrategy.SHARD_GRAD_OP where memory allows",
        "exposed-reduce-scatter": "larger units (auto_wrap_policy), accumulate with no_sync()",
        "small-collectives": "larger units: auto_wrap_policy",
        "fp32-reduction": "MixedPrecision(reduce_dtype=torch.bfloat16); check the loss",
    },
    "DeepSpeed": {
        "exposed-all-reduce": '"zero_optimization": {"overlap_comm": true, "reduce_bucket_size": '
        "5e8}",
        "exposed-reduce-scatter": '"zero_optimization": {"overlap_comm": true, '
        '"reduce_bucket_size": 5e8}',
        "exposed-all-gather": '"zero_optimization": {"stage3_prefetch_bucket_size": 5e8, '
        '"stage3_param_persistence_threshold": 1e6}',
        "small-collectives": '"zero_optimization": {"reduce_bucket_size": 5e8, '
        '"allgather_bucket_size": 5e8}',
        "fp32-reduction": '"communication_data_type": "bf16"; check the loss',
    },
    "Megatron": {
        "exposed-all-reduce": "data parallel: --overlap-grad-reduce; tensor parallel: "
        "--sequence-parallel --tp-comm-overlap",
        "exposed-all-gather": "--overlap-param-gather (data parallel), --tp-comm-overlap (tensor "
        "parallel)",
        "exposed-reduce-scatter": "--overlap-grad-reduce (data parallel), --tp-comm-overlap "
        "(tensor parallel)",
        "exposed-all-to-all": "--overlap-moe-expert-parallel-comm, --moe-shared-expert-overlap",
        "exposed-send-receive": "interleaved stages (--num-layers-per-virtual-pipeline-stage) "
        "without --no-overlap-p2p-communication; more micro-batches (--global-batch-size)",
        "small-collectives": "--ddp-bucket-size larger",
        "fp32-reduction": "--grad-reduce-in-bf16, and leave out "
        "--accumulate-allreduce-grads-in-fp32; check the loss",
    },
    "vLLM": {
        "launch-bound": "leave out --enforce-eager, so that a step is launched as CUDA graphs",
        "host-bound": "--async-scheduling prepares the next step while this one runs",
        "tiny-kernels": "larger batches: --max-num-seqs, --max-num-batched-tokens",
        "small-grid": "larger batches: --max-num-seqs, --max-num-batched-tokens",
        "exposed-all-reduce": "leave out --disable-custom-all-reduce; a smaller "
        "--tensor-parallel-size with more replicas (--data-parallel-size)",
        "exposed-all-to-all": "--enable-dbo computes one half of a batch while the other travels",
        "exposed-send-receive": "inside a node --tensor-parallel-size instead of "
        "--pipeline-parallel-size",
        "small-collectives": "leave out --disable-custom-all-reduce",
        "straggler-more-work": "--enable-eplb evens out the load of experts",
    },
    "SGLang": {
        "launch-bound": "leave out --disable-cuda-graph; --cuda-graph-max-bs as large as batches",
        "host-bound": "leave out --disable-overlap-schedule, which prepares the next step "
        "meanwhile",
        "tiny-kernels": "larger batches: --max-running-requests",
        "small-grid": "larger batches: --max-running-requests",
        "exposed-all-reduce": "leave out --disable-custom-all-reduce; on NVIDIA's "
        "--enable-flashinfer-allreduce-fusion; a smaller --tp-size with more replicas (--dp-size)",
        "exposed-all-to-all": "--enable-two-batch-overlap computes one half of a batch while the "
        "other travels",
        "exposed-send-receive": "inside a node --tp-size instead of --pp-size",
        "small-collectives": "leave out --disable-custom-all-reduce",
        "straggler-more-work": "--enable-eplb evens out the load of experts",
    },
}


def detect_framework(names: Iterable[str], *, trains: bool) -> str:
    """The framework that these names of spans show; empty for none."""
    known = list(names)
    rules = _TRAINERS if trains else _ENGINES
    return next((one for one, rule in rules if any(map(rule.search, known))), "")
