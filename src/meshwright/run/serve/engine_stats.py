"""`EngineStats`: gauges and counters of a serving engine, summed over replicas."""

from collections.abc import Iterable
from typing import Any

import msgspec


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine does at this moment, and what it did since it began."""

    engines: int = 1
    """How many there are, behind a router."""
    healthy_engines: int | None = None
    """Those of them that make progress; None where it is one, which says so itself."""
    running: int = 0
    waiting: int = 0
    kv_cache_usage: float = 0.0
    """Share of the blocks that requests hold."""
    prompt_tokens: int = 0
    """Tokens of prompts whose answers began, those found in the cache included."""
    output_tokens: int = 0
    prefix_queries: int = 0
    """Tokens of prompts that were looked up in the prefix cache."""
    prefix_hits: int = 0
    """Those of them that were found."""
    preemptions: int = 0
    steps: int = 0
    step_sizes: tuple[int, ...] = ()
    """Steps by their tokens: up to each of `STEP_SIZE_BUCKETS`, and beyond."""
    step_tokens: int = 0
    drafts: int = 0
    """Guesses ahead that were checked, their tokens, and those of them that were right."""
    draft_tokens: int = 0
    accepted_tokens: int = 0
    since_last_step_s: float | None = None
    """Seconds since the last step ended while requests are there; None where none are."""
    num_gpu_blocks: int = 0
    """Blocks of keys and values that there are; 0 where no engine is there to have any."""
    block_size: int = 0
    enable_prefix_caching: bool = False
    running_adapters: tuple[str, ...] = ()
    """LoRA adapters of requests that have a place, and of those that wait for one."""
    waiting_adapters: tuple[str, ...] = ()
    extra: dict[str, Any] = {}

    def add_counters(self, before: "EngineStats") -> "EngineStats":
        """Return the same with what was counted before; what is done at the moment stays."""
        return msgspec.structs.replace(self, **sum_counters((self, before)))


STEP_SIZE_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Tokens of a step that are told apart: the bounds that vLLM's figures have."""

COUNTER_FIELDS = (
    *("prompt_tokens", "output_tokens", "prefix_queries", "prefix_hits", "preemptions"),
    *("steps", "step_tokens", "drafts", "draft_tokens", "accepted_tokens"),
)
"""Gauges that only grow."""


def sum_counters(gauges: Iterable[EngineStats]) -> dict[str, Any]:
    """Return what several gauges have counted, as one has it."""
    every = tuple(gauges)
    found: dict[str, Any] = {
        name: sum(getattr(one, name) for one in every) for name in COUNTER_FIELDS
    }
    sizes = [one.step_sizes for one in every if one.step_sizes]
    found["step_sizes"] = tuple(map(sum, zip(*sizes, strict=True)))
    return found
