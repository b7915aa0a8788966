"""Bridges to the frameworks people already run: their settings as values here, and back.

    BRIDGES["megatron"].export_config(layout, model).text     flags to paste
    BRIDGES["megatron"].import_config(text).layout            a `Layout` from someone's flags

What a target cannot say is listed in `ExportedConfig.unexpressed`, never dropped silently; what the
imported settings say beyond a `Layout` and a `Model` is listed in `ImportedConfig.unknown`.
"""

from meshwright.errors import InputError
from meshwright.spec.bridge.framework_bridge import ExportedConfig, FrameworkBridge, ImportedConfig
from meshwright.spec.name_suggestions import build_unknown_name_problem

BRIDGES: dict[str, FrameworkBridge] = {
    bridge.name: bridge
    for bridge in (
        FrameworkBridge(name="megatron", title="Megatron-LM flags", ending=".sh"),
        FrameworkBridge(name="torchtitan", title="torchtitan TOML", ending=".toml"),
        FrameworkBridge(name="deepspeed", title="DeepSpeed JSON", ending=".json"),
        FrameworkBridge(name="nemo", title="Megatron-Bridge recipe fields", ending=".yaml"),
        FrameworkBridge(name="fsdp2", title="FSDP2 settings", ending=".py"),
    )
}
"""Every target by the name the command line uses."""


def find_bridge(name: str) -> FrameworkBridge:
    """Return the bridge to a target, or say which targets there are."""
    if name not in BRIDGES:
        raise InputError([build_unknown_name_problem("target", name, BRIDGES)])
    return BRIDGES[name]


__all__ = ["BRIDGES", "ExportedConfig", "FrameworkBridge", "ImportedConfig", "find_bridge"]
