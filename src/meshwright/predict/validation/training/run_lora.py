"""The adapter that a published fine-tuning run trained: what its row states, or its recipe's."""

from collections.abc import Mapping
from typing import Any

from meshwright.spec.serialization import decode
from meshwright.spec.workload import LoRASpec

DEFAULT_LORA = LoRASpec(rank=16)
"""Rank 16 on every linear layer: the LoRA benchmarks of NeMo AutoModel (`examples/llm_finetune`)
say so."""
NVIDIA_RECIPES = LoRASpec(rank=16, targets=("qkv",))
"""The performance recipes of Megatron-Bridge (`perf_recipes/llama`) and of NeMo before it
(`llm/recipes`), which dgxc-benchmarking runs, put adapters of rank 16 on `linear_qkv` alone."""


def read_lora(row: Mapping[str, Any]) -> tuple[LoRASpec | None, tuple[str, ...]]:
    """Return the adapter of a row, None where it trained every weight, and what was assumed."""
    if row.get("task") != "lora":
        return None, ()
    stated = row.get("adapter")
    if stated is not None:
        return decode(LoRASpec, stated, "adapter"), ()
    named = f"{row.get('family') or ''} {row.get('source') or ''}".lower()
    recipes = any(name in named for name in ("dgxc", "megatron-bridge", "nvidia/nemo "))
    found = NVIDIA_RECIPES if recipes else DEFAULT_LORA
    return found, (f"adapters of rank {found.rank} on {', '.join(found.targets)}",)
