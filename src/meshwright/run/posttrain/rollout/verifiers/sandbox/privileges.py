"""What a process gives up: capabilities, its user, and privileges through programs it starts."""

import ctypes
import os
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

from meshwright.run.posttrain.rollout.verifiers.sandbox.linux_calls import (
    MACHINE,
    PR_CAP_AMBIENT,
    PR_CAP_AMBIENT_CLEAR_ALL,
    PR_CAPBSET_DROP,
    PR_SET_DUMPABLE,
    PR_SET_NO_NEW_PRIVS,
    prctl,
    system_call,
)

UNPRIVILEGED_ID = 65534
"""Of `nobody`, as user and as group."""
_CAPSET = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION_3 = 0x20080522
_MOST_CAPABILITIES = 64


def forbid_new_privileges() -> None:
    """Let no program that this process starts gain privileges, such as by set-user-ID."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def forbid_inspection() -> None:
    """Let no process of the same user trace this one, or read its memory and environment."""
    prctl(PR_SET_DUMPABLE, 0)


def drop_bounding_set() -> None:
    """Let no program that this process starts have capabilities."""
    for number in range(_MOST_CAPABILITIES):
        try:
            prctl(PR_CAPBSET_DROP, number)
        except OSError:
            break  # beyond the last one, or without the right to drop them


def drop_capabilities() -> None:
    """Give up all capabilities, for good."""
    drop_bounding_set()
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    system_call(_CAPSET[MACHINE], ctypes.c_char_p(header), ctypes.c_char_p(bytes(24)))


def become_unprivileged() -> None:
    """Become `nobody`; needs root."""
    os.setgroups([])
    os.setresgid(UNPRIVILEGED_ID, UNPRIVILEGED_ID, UNPRIVILEGED_ID)
    os.setresuid(UNPRIVILEGED_ID, UNPRIVILEGED_ID, UNPRIVILEGED_ID)


def are_open_to_all(paths: Iterable[str]) -> bool:
    """Say whether every user may reach paths; those that are not there do not count."""
    return all(_is_open_to_all(Path(path)) for path in paths)


def _is_open_to_all(path: Path) -> bool:
    try:
        modes = [each.stat().st_mode for each in (path, *path.parents)]
    except OSError:
        return True
    return all(mode & stat.S_IXOTH or not stat.S_ISDIR(mode) for mode in modes) and bool(
        modes[0] & stat.S_IROTH
    )


def prefer_as_oom_victim() -> None:
    """Let the kernel end this process first where memory runs out, and not who trains."""
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
