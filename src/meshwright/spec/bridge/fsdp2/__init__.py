"""FSDP2: PyTorch's fully_shard."""

from meshwright.spec.bridge.fsdp2.snippet import export, import_

__all__ = ["export", "import_"]
