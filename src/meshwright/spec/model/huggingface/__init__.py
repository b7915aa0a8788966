"""Hugging Face `config.json`: read into a `Model` and written back."""

from meshwright.spec.model.huggingface.convert import (
    families,
    load_config,
    read_config,
    write_config,
)

__all__ = ["families", "load_config", "read_config", "write_config"]
