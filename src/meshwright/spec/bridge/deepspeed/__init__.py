"""DeepSpeed: the JSON configuration."""

from meshwright.spec.bridge.deepspeed.ds_config import export_config, import_config

__all__ = ["export_config", "import_config"]
