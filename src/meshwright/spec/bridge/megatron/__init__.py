"""Megatron-LM: command-line flags."""

from meshwright.spec.bridge.megatron.command_line import export_config, import_config

__all__ = ["export_config", "import_config"]
