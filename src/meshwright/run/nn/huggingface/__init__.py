"""Hugging Face checkpoints: load a decoder from one, save it as one."""

from meshwright.run.nn.huggingface.hf_loader import load_hf_checkpoint
from meshwright.run.nn.huggingface.hf_writer import save_hf_checkpoint
from meshwright.run.nn.huggingface.model_registry import list_model_types

__all__ = ["list_model_types", "load_hf_checkpoint", "save_hf_checkpoint"]
