"""NeMo's Megatron-Bridge: recipe fields."""

from meshwright.spec.bridge.nemo.recipe import export, import_

__all__ = ["export", "import_"]
