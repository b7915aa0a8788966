"""`SchedulerConfig`: how many requests and tokens an engine takes at a time, and what it may keep.

Whatever batches requests takes this one value: the engine on its GPU, and the simulation of it.
"""

from typing import Literal, get_args

import msgspec

from meshwright.spec.field_checks import FieldChecker, check_number

PreemptionMode = Literal["recompute", "swap"]
KVCacheDtype = Literal["auto", "fp8"]


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one engine takes at a time."""

    max_num_batched_tokens: int = 8192
    """Tokens computed in one step: one for each decoding request, the rest of prompts."""
    max_num_seqs: int = 256
    """Requests that have a place in the engine at a time."""
    long_prefill_token_threshold: int | None = None
    """Tokens of one prompt in one step, so that long prompts leave room for short ones; None takes
    what the step has left."""
    max_cudagraph_capture_size: int = 0
    """Steps with parts of prompts that have at most so many tokens are replayed as a graph, like
    those that only decode; 0 launches their kernels one by one."""
    block_size: int = 16
    """Tokens of one block of the KV cache."""
    num_gpu_blocks: int | None = None
    """Blocks of the KV cache; None takes what the memory of the device leaves."""
    kv_cache_dtype: KVCacheDtype = "auto"
    """Number format of keys and values; `auto` is that of the weights, 16 bits at least."""
    num_cpu_blocks: int = 0
    """Blocks in host memory, for requests that are swapped out."""
    enable_prefix_caching: bool = True
    """Keep the blocks of ended requests, and share those of equal beginnings."""
    enable_chunked_prefill: bool = True
    """Compute parts of prompts in the steps of decoding requests; otherwise an engine computes
    whole prompts in steps of their own, before anything decodes on."""
    preemption_mode: PreemptionMode = "recompute"
    """What happens to a request whose blocks others need: computed again later, or moved to host
    memory and back."""
    watermark: float = 0.01
    """Share of the blocks that is left free when a request is admitted, for those that run."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        tokens, requests = self.max_num_batched_tokens, self.max_num_seqs
        bounds.count(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            block_size=self.block_size,
            num_gpu_blocks=self.num_gpu_blocks,
        )
        bounds.one_of("kv_cache_dtype", self.kv_cache_dtype, get_args(KVCacheDtype))
        bounds.one_of("preemption_mode", self.preemption_mode, get_args(PreemptionMode))
        bounds.count(
            0,
            num_cpu_blocks=self.num_cpu_blocks,
            max_cudagraph_capture_size=self.max_cudagraph_capture_size,
        )
        bounds.problems += check_number("watermark", self.watermark, 0, 0.9)
        if (
            bounds.is_valid("num_cpu_blocks")
            and self.preemption_mode == "swap"
            and not self.num_cpu_blocks
        ):
            bounds.add("num_cpu_blocks", "swapping needs blocks in host memory", "use 1024, say")
        if (
            bounds.is_valid("max_num_batched_tokens", "max_cudagraph_capture_size")
            and self.max_cudagraph_capture_size > tokens
        ):
            what = (
                f"{self.max_cudagraph_capture_size:,} tokens are more than a step has, {tokens:,}"
            )
            bounds.add("max_cudagraph_capture_size", what, f"use {tokens} or fewer")
        if bounds.is_valid("max_num_batched_tokens", "max_num_seqs") and tokens < requests:
            what = f"{tokens} tokens leave none for some of {requests} requests"
            fix = f"use {requests} or more, or max_num_seqs={tokens}"
            bounds.add("max_num_batched_tokens", what, fix)
        bounds.raise_problems()
