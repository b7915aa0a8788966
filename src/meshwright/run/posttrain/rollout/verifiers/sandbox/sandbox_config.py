"""`SandboxConfig`: what a process may do; `SandboxStatus`: what holds it to that here."""

from collections.abc import Mapping
from typing import NamedTuple

PROTECTIONS = ("secrets", "network", "files", "processes", "system calls", "limits")
"""What `strict` requires."""


class SandboxConfig(NamedTuple):
    """What a process may do."""

    folder: str
    """Where it works, and writes."""
    memory_bytes: int
    file_bytes: int
    """Of each file that it writes."""
    processes: bool = False
    """Whether it may start processes and threads."""
    network: bool = False
    readable: tuple[str, ...] | None = None
    """Paths that it may read; None allows what its user may read."""
    writable: tuple[str, ...] = ()
    """Paths beside `folder` that it may write."""
    layers: frozenset[str] = frozenset(("namespaces", "landlock", "seccomp", "user"))
    """What is tried; a test leaves some out."""


class SandboxStatus(NamedTuple):
    """Which layers are active, and why others are not."""

    active: tuple[str, ...]
    """Such as `network namespace` and `Landlock 7`."""
    missing: Mapping[str, str]
    """Layers that this system refused, with its reason."""

    def find_unprotected(self) -> list[str]:
        """Return what nothing protects, of `PROTECTIONS`."""
        active = {name.rpartition(" ")[0] if name[-1].isdigit() else name for name in self.active}
        landlock = "Landlock" in active
        # With CAP_PERFMON a process reads /proc/PID/environ whatever Landlock says.
        is_shut_out = landlock and "no capabilities" in active
        hides_others = {"PID namespace", "own /proc"} <= active
        held = {
            "secrets": hides_others or is_shut_out or "other user" in active,
            "network": bool(active & {"network namespace", "no sockets", "network"}),
            "files": landlock or "read-only mounts" in active,
            "processes": bool(active & {"PID namespace", "subreaper"}),
            "system calls": "seccomp" in active,
            "limits": "rlimits" in active,
        }
        return [name for name in PROTECTIONS if not held[name]]

    def __str__(self) -> str:
        text = ", ".join(self.active) or "nothing"
        unprotected = self.find_unprotected()
        return text + (f"; unprotected: {', '.join(unprotected)}" if unprotected else "")


class LayerRecord:
    """Collects which layers were applied."""

    def __init__(self) -> None:
        self.active: list[str] = []
        self.missing: dict[str, str] = {}

    def add(self, name: str) -> None:
        """Note an active layer."""
        if name not in self.active:
            self.active.append(name)

    def refuse(self, name: str, error: object) -> None:
        """Note a layer that the system refused."""
        self.missing[name] = str(error)

    @property
    def status(self) -> SandboxStatus:
        """What was noted."""
        return SandboxStatus(tuple(self.active), dict(self.missing))
