"""`ServingEngine`: what serving software adds to the work itself, and how it fills its steps.

The same model on the same GPU takes longer under one engine than under another because of what
the host does between two steps, how many small kernels a layer has, how well kernels fit, and how
requests are batched. Each of these is a figure with a physical meaning; `validation/serving/fit.py`
fits them to published rows, all rows of an engine together.
"""

from typing import Literal

import msgspec

MemoryBudget = Literal["of_free", "of_all"]


class ServingEngine(msgspec.Struct, frozen=True, kw_only=True):
    """One serving engine, or a family of its versions."""

    name: str
    step_s: float = 1e-3
    """Host time of a step that the GPU waits for."""
    request_s: float = 2e-6
    """The same for each request in the step."""
    prefill_s: float = 50e-6
    """What each layer adds to a step with parts of prompts, whoever waits for whom."""
    launch_s: float = 0.0
    """Host time of each layer in such a step, whose kernels are launched singly."""
    overlaps_host: bool = False
    """The host works while the GPU does, so that the longer of both counts, not the sum."""
    gemm_slowdown: float = 1.0
    """Time of products over what the kernel tables say of them alone."""
    power_limit_exponent: float = 0.25
    """Exponent of the chip's slow-down under lasting load: 1 has products at its power limit."""
    weight_bandwidth_share: float | None = None
    """Share of the bandwidth at which products read weights; None takes the kernel tables'."""
    per_channel_scales: bool = False
    """Eight-bit weights have a scale for each output, and inputs one for each token."""
    cast_kernels: float = 0.0
    """Kernels that round the input of an eight-bit product; 0 where the one before does it."""
    max_prefetch_rows: int = 0
    """Up to so many rows, 16-bit products fetch weights while the kernel before them ends."""
    attention_slowdown: float = 1.0
    """Time of prompts' attention over what the device's best kernel takes for long ones."""
    fp8_kv_attention_slowdown: float | None = None
    """The same where keys are kept in eight bits; None takes the same."""
    tile_overhead_keys: float = 0.0
    """Keys that a prompt's token costs beyond those it sees: beginnings and ends of tiles."""
    fp8_kv_tile_overhead_keys: float | None = None
    """The same where keys are kept in eight bits; None takes the same."""
    kv_bandwidth_share: float = 0.8
    """Share of the memory bandwidth at which decoding reads keys and values."""
    fp8_kv_bandwidth_share: float | None = None
    """The same of those kept in eight bits, which are widened on the way; None takes the same."""
    attention_s: float = 6e-6
    """What one layer's attention takes before it reads: launch, split and merge."""
    small_kernels: float = 5.0
    """Small kernels of a layer: norms, rotation, storing keys and values, activation, casts."""
    all_reduce_latency_s: float = 6e-6
    """Latency of an all-reduce of a few tokens over fast links."""
    link_bandwidth_share: float = 0.6
    """Share of the fast links' bandwidth that all-reduces and exchanges reach."""
    moe_layer_s: float = 15e-6
    """Routing, sorting and summing of one layer of experts."""
    frontend_s: float = 5e-3
    """From a request at the server to its first step, and from a token to the client."""
    frontend_steps: float = 0.0
    """The same in decode steps: engines that decide ahead, or look for new requests only now and
    then, are late by steps, which are short for small models and long for full batches."""
    memory_budget: MemoryBudget = "of_all"
    """Whether `gpu_memory_utilization` is a share of the device, or of what weights leave."""
    gpu_memory_utilization: float = 0.9
    """Share of the memory that keys and values may have (with the weights, for `of_all`)."""
    reserve_bytes: float = 2e9
    """Memory for libraries, captured graphs and workspaces."""
    logit_copies: float = 0.0
    """Numbers that choosing tokens keeps for each word and each request that may run: scores, and
    what sorts them, whole on every GPU."""
    max_num_seqs: int = 256
    """Requests of a step at most, where a run does not say."""
    max_num_batched_tokens: int = 8192
    """Tokens of a step at most."""
    enable_chunked_prefill: bool = True
    """Whether prompts share steps with decoding requests."""


TENSORRT_LLM_EARLY = ServingEngine(
    name="TensorRT-LLM before 0.15", memory_budget="of_free", gpu_memory_utilization=0.95,
    max_num_seqs=4096,
    step_s=0.00157, request_s=2.54e-06, prefill_s=1.1e-05, gemm_slowdown=1.13,
    attention_slowdown=0.987,
    kv_bandwidth_share=0.873, attention_s=3e-05, small_kernels=12, all_reduce_latency_s=3.08e-05,
    link_bandwidth_share=0.109,
    moe_layer_s=1.1e-06, frontend_s=0.001, reserve_bytes=2.12e+09, logit_copies=9,
)  # fmt: skip
"""Compiled engines up to 0.14, which the same model, GPU and lengths took 5 to 20 % longer with.

`logit_copies` alone is from their own rows, by the median of errors; either half of them says 10.
"""
TENSORRT_LLM = ServingEngine(
    name="TensorRT-LLM", memory_budget="of_free", gpu_memory_utilization=0.95, max_num_seqs=4096,
    step_s=0.00055, request_s=2.76e-06, prefill_s=1.04e-06, gemm_slowdown=1.13,
    attention_slowdown=1.03,
    kv_bandwidth_share=0.95, attention_s=3e-05, small_kernels=12, all_reduce_latency_s=2.09e-06,
    link_bandwidth_share=0.129,
    moe_layer_s=1.1e-06, frontend_s=0.001, reserve_bytes=1.08e+09,
)  # fmt: skip
"""Compiled engines from 0.15 to 0.18, and MLPerf submissions."""
TENSORRT_LLM_TORCH = ServingEngine(
    name="TensorRT-LLM PyTorch", memory_budget="of_free", gpu_memory_utilization=0.95,
    max_num_seqs=4096,
    step_s=0.000489, request_s=5.97e-06, prefill_s=0.000248, gemm_slowdown=1.08,
    attention_slowdown=0.8,
    kv_bandwidth_share=0.95, attention_s=5.51e-06, small_kernels=4.59,
    all_reduce_latency_s=5.29e-06, link_bandwidth_share=0.172,
    moe_layer_s=7.65e-06, frontend_s=0.0928, reserve_bytes=8.72e+09,
)  # fmt: skip
"""The PyTorch backend, which its performance page uses since 0.19."""
VLLM = ServingEngine(
    name="vLLM", gpu_memory_utilization=0.9, max_num_seqs=1024,
    step_s=0.00049, request_s=8.01e-06, prefill_s=0.000143, gemm_slowdown=1.01,
    attention_slowdown=2.5,
    kv_bandwidth_share=0.95, attention_s=1.94e-05, small_kernels=7.62, all_reduce_latency_s=7.4e-06,
    link_bandwidth_share=0.156,
    moe_layer_s=1.5e-05, frontend_s=0.001, frontend_steps=5, reserve_bytes=1.11e+09,
)  # fmt: skip
"""The V1 engine and what came before it."""
SGLANG = ServingEngine(
    name="SGLang", gpu_memory_utilization=0.88, max_num_seqs=4096, enable_chunked_prefill=False,
    overlaps_host=True,
    step_s=0.001, request_s=2e-06, prefill_s=0.000239, gemm_slowdown=0.95, attention_slowdown=1.12,
    kv_bandwidth_share=0.649, attention_s=2.09e-05, small_kernels=12, all_reduce_latency_s=8.76e-06,
    link_bandwidth_share=0.428,
    moe_layer_s=4.48e-05, frontend_s=0.001, frontend_steps=20.9, reserve_bytes=4.09e+09,
)  # fmt: skip
"""With its overlapped scheduler."""
MESHWRIGHT = ServingEngine(
    name="Meshwright", gpu_memory_utilization=0.9, max_num_seqs=256, overlaps_host=True,
    power_limit_exponent=1.25, cast_kernels=1.0,
    per_channel_scales=True, max_prefetch_rows=128, step_s=0.0004, request_s=6.5e-06, prefill_s=0.0,
    launch_s=0.000927, gemm_slowdown=1.0, attention_slowdown=1.31, fp8_kv_attention_slowdown=1.6,
    tile_overhead_keys=674.0,
    fp8_kv_tile_overhead_keys=1060.0, weight_bandwidth_share=0.82, kv_bandwidth_share=0.919,
    fp8_kv_bandwidth_share=0.863,
    attention_s=1.2e-05, small_kernels=5.15,
    all_reduce_latency_s=6e-06, link_bandwidth_share=0.5, moe_layer_s=1.5e-05, frontend_s=0.001,
    reserve_bytes=2e+09,
)  # fmt: skip
"""Our own (`mw serve`), from steps of three kinds of one H200 (`validation/serving/own.py`).

Calibrated to them: the share of the bandwidth at which weights are read, small kernels of a layer,
and the host's time of a layer in steps with prompts. From kernels alone: both kinds of attention,
over 16-bit and eight-bit keys; the slow-down of products of random numbers under lasting load,
1.22. Counted: casts, scales by row, the host's time of a decoding step and request. Not measured:
fp8 products of few rows, messages between GPUs, experts, arrival, the reserve, any other GPU.
"""
ENGINES = (MESHWRIGHT, TENSORRT_LLM, TENSORRT_LLM_TORCH, VLLM, SGLANG)
"""Those that a run of today may choose."""
