"""Bridges to the frameworks people already run: their settings as values here, and back.

    TARGETS["megatron"].export(layout, model).text     flags to paste
    TARGETS["megatron"].import_(text).layout           a `Layout` from someone's flags

What a target cannot say is listed in `Exported.unexpressed`, never dropped silently; what the
imported settings say beyond a `Layout` and a `Model` is listed in `Imported.unknown`.
"""

from meshwright.errors import InputError
from meshwright.spec.bridge.results import Bridge, Exported, Imported
from meshwright.spec.names import unknown_name

TARGETS: dict[str, Bridge] = {
    bridge.name: bridge
    for bridge in (
        Bridge(name="megatron", title="Megatron-LM flags", ending=".sh"),
        Bridge(name="torchtitan", title="torchtitan TOML", ending=".toml"),
        Bridge(name="deepspeed", title="DeepSpeed JSON", ending=".json"),
        Bridge(name="nemo", title="Megatron-Bridge recipe fields", ending=".yaml"),
        Bridge(name="fsdp2", title="FSDP2 settings", ending=".py"),
    )
}
"""Every target by the name the command line uses."""


def find_bridge(name: str) -> Bridge:
    """Return the bridge to a target, or say which targets there are."""
    if name not in TARGETS:
        raise InputError([unknown_name("target", name, TARGETS)])
    return TARGETS[name]


__all__ = ["TARGETS", "Bridge", "Exported", "Imported", "find_bridge"]
