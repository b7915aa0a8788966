"""Hugging Face `config.json`: read into a `Model` and written back."""

from meshwright.spec.model.huggingface.config_json import (
    list_model_types,
    load_config,
    read_config,
    write_config,
)

__all__ = ["list_model_types", "load_config", "read_config", "write_config"]
