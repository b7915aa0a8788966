"""Hugging Face checkpoints: load a decoder from one, save it as one."""

from meshwright.run.nn.huggingface.families import families
from meshwright.run.nn.huggingface.load import load
from meshwright.run.nn.huggingface.save import save

__all__ = ["families", "load", "save"]
