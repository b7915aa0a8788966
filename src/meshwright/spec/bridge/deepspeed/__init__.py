"""DeepSpeed: the JSON configuration."""

from meshwright.spec.bridge.deepspeed.config import export, import_

__all__ = ["export", "import_"]
