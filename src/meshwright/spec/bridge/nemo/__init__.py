"""NeMo's Megatron-Bridge: recipe fields."""

from meshwright.spec.bridge.nemo.recipe import export_config, import_config

__all__ = ["export_config", "import_config"]
