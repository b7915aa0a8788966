"""`Limits`: how many requests and tokens an engine takes at a time, and what it may keep.

Whatever batches requests takes this one value: the engine on its GPU, and the simulation of it.
"""

from typing import Literal, get_args

import msgspec

from meshwright.spec.bounds import Bounds, real

Preemption = Literal["recompute", "swap"]
Mixing = Literal["mixed", "apart"]
KvPrecision = Literal["model", "fp8"]


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one engine takes at a time."""

    batch_tokens: int = 8192
    """Tokens computed in one step: one for each decoding request, the rest of prompts."""
    batch_requests: int = 256
    """Requests that have a place in the engine at a time."""
    chunk_tokens: int | None = None
    """Tokens of one prompt in one step, so that long prompts leave room for short ones; None takes
    what the step has left."""
    graph_tokens: int = 0
    """Steps with parts of prompts that have at most so many tokens are replayed as a graph, like
    those that only decode; 0 launches their kernels one by one."""
    block_tokens: int = 16
    """Tokens of one block of the KV cache."""
    kv_blocks: int | None = None
    """Blocks of the KV cache; None takes what the memory of the device leaves."""
    kv_precision: KvPrecision = "model"
    """Number format of keys and values; `model` is that of the weights, 16 bits at least."""
    host_blocks: int = 0
    """Blocks in host memory, for requests that are swapped out."""
    prefix_cache: bool = True
    """Keep the blocks of ended requests, and share those of equal beginnings."""
    mixing: Mixing = "mixed"
    """`mixed` computes parts of prompts in the steps of decoding requests; `apart` computes whole
    prompts in steps of their own, before anything decodes on."""
    preemption: Preemption = "recompute"
    """What happens to a request whose blocks others need: computed again later, or moved to host
    memory and back."""
    watermark: float = 0.01
    """Share of the blocks that is left free when a request is admitted, for those that run."""

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.count(
            batch_tokens=self.batch_tokens,
            batch_requests=self.batch_requests,
            chunk_tokens=self.chunk_tokens,
            block_tokens=self.block_tokens,
            kv_blocks=self.kv_blocks,
        )
        bounds.one_of("kv_precision", self.kv_precision, get_args(KvPrecision))
        bounds.one_of("mixing", self.mixing, get_args(Mixing))
        bounds.one_of("preemption", self.preemption, get_args(Preemption))
        bounds.count(0, host_blocks=self.host_blocks, graph_tokens=self.graph_tokens)
        bounds.problems += real("watermark", self.watermark, 0, 0.9)
        if bounds.sound("host_blocks") and self.preemption == "swap" and not self.host_blocks:
            bounds.add("host_blocks", "swapping needs blocks in host memory", "use 1024, say")
        if bounds.sound("batch_tokens", "graph_tokens") and self.graph_tokens > self.batch_tokens:
            what = f"{self.graph_tokens:,} tokens are more than a step has, {self.batch_tokens:,}"
            bounds.add("graph_tokens", what, f"use {self.batch_tokens} or fewer")
        tokens, requests = self.batch_tokens, self.batch_requests
        if bounds.sound("batch_tokens", "batch_requests") and tokens < requests:
            what = f"{tokens} tokens leave none for some of {requests} requests"
            fix = f"use {requests} or more, or batch_requests={tokens}"
            bounds.add("batch_tokens", what, fix)
        bounds.require()
