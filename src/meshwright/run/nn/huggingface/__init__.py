"""Hugging Face checkpoints: load a decoder from one, save it as one."""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.run.nn.huggingface.hf_loader import load_hf_checkpoint
    from meshwright.run.nn.huggingface.hf_writer import save_hf_checkpoint
    from meshwright.run.nn.huggingface.model_registry import list_model_types

# Reading a tokenizer needs no torch.
_MODULES = {
    "list_model_types": "meshwright.run.nn.huggingface.model_registry",
    "load_hf_checkpoint": "meshwright.run.nn.huggingface.hf_loader",
    "save_hf_checkpoint": "meshwright.run.nn.huggingface.hf_writer",
}

__all__ = ["list_model_types", "load_hf_checkpoint", "save_hf_checkpoint"]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
