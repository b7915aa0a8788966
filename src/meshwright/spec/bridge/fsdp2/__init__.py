"""FSDP2: PyTorch's fully_shard."""

from meshwright.spec.bridge.fsdp2.snippet import export_config, import_config

__all__ = ["export_config", "import_config"]
