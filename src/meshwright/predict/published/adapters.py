"""The adapter that a published fine-tuning run trained: what its row states, or its recipe's."""

from collections.abc import Mapping
from typing import Any

from meshwright.spec.read import read
from meshwright.spec.workload import Adapter

USUAL = Adapter(rank=16)
"""Rank 16 on every linear layer: the LoRA benchmarks of NeMo AutoModel (`examples/llm_finetune`)
say so."""
NVIDIA_RECIPES = Adapter(rank=16, targets=("qkv",))
"""The performance recipes of Megatron-Bridge (`perf_recipes/llama`) and of NeMo before it
(`llm/recipes`), which dgxc-benchmarking runs, put adapters of rank 16 on `linear_qkv` alone."""


def adapter_of(row: Mapping[str, Any]) -> tuple[Adapter | None, tuple[str, ...]]:
    """Return the adapter of a row, None where it trained every weight, and what was assumed."""
    if row.get("task") != "lora":
        return None, ()
    stated = row.get("adapter")
    if stated is not None:
        return read(Adapter, stated, "adapter"), ()
    named = f"{row.get('family') or ''} {row.get('source') or ''}".lower()
    recipes = any(name in named for name in ("dgxc", "megatron-bridge", "nvidia/nemo "))
    found = NVIDIA_RECIPES if recipes else USUAL
    return found, (f"adapters of rank {found.rank} on {', '.join(found.targets)}",)
