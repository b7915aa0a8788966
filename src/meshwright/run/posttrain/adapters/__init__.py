"""Adapters: LoRA and DoRA on a decoder's linear layers, in PEFT's names, shapes and folders.

Lora             rank, scale, dropout and targets
lora_for         the same from what a workload says of its adapter
adapt            freezes a decoder and puts a new adapter beside it
DecoderAdapter   the parameters that are trained; merges, unmerges, steps aside
save_adapter     writes PEFT's folder, which `peft` and our engine read
load_adapter     reads it, whoever wrote it
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.run.posttrain.adapters.adapter import DecoderAdapter, adapt, lora_for
    from meshwright.run.posttrain.adapters.folder import load_adapter, save_adapter
    from meshwright.run.posttrain.adapters.settings import Lora

_HOMES = {
    "DecoderAdapter": "meshwright.run.posttrain.adapters.adapter",
    "Lora": "meshwright.run.posttrain.adapters.settings",
    "adapt": "meshwright.run.posttrain.adapters.adapter",
    "load_adapter": "meshwright.run.posttrain.adapters.folder",
    "lora_for": "meshwright.run.posttrain.adapters.adapter",
    "save_adapter": "meshwright.run.posttrain.adapters.folder",
}

__all__ = ["DecoderAdapter", "Lora", "adapt", "load_adapter", "lora_for", "save_adapter"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
