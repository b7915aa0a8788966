"""Adapters: LoRA and DoRA on a decoder's linear layers, in PEFT's names, shapes and folders.

LoRAConfig         rank, scale, dropout and targets
build_lora_config  the same from what a workload says of its adapter
attach_adapter     freezes a decoder and puts a new adapter beside it
DecoderAdapter     the parameters that are trained; merges, unmerges, steps aside
save_adapter       writes PEFT's folder, which `peft` and our engine read
load_adapter       reads it, whoever wrote it
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.run.posttrain.lora.adapter_checkpoint import load_adapter, save_adapter
    from meshwright.run.posttrain.lora.decoder_adapter import (
        DecoderAdapter,
        attach_adapter,
        build_lora_config,
    )
    from meshwright.run.posttrain.lora.lora_config import LoRAConfig

_MODULES = {
    "DecoderAdapter": "meshwright.run.posttrain.lora.decoder_adapter",
    "LoRAConfig": "meshwright.run.posttrain.lora.lora_config",
    "attach_adapter": "meshwright.run.posttrain.lora.decoder_adapter",
    "load_adapter": "meshwright.run.posttrain.lora.adapter_checkpoint",
    "build_lora_config": "meshwright.run.posttrain.lora.decoder_adapter",
    "save_adapter": "meshwright.run.posttrain.lora.adapter_checkpoint",
}

__all__ = [
    "DecoderAdapter",
    "LoRAConfig",
    "attach_adapter",
    "build_lora_config",
    "load_adapter",
    "save_adapter",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
