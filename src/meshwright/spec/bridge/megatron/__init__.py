"""Megatron-LM: command-line flags."""

from meshwright.spec.bridge.megatron.command import export, import_

__all__ = ["export", "import_"]
