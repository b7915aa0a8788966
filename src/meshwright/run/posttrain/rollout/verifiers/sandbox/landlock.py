"""Landlock: rules that a process sets itself, for files, TCP, signals and abstract sockets.

A process under such rules can also no longer trace or inspect one that is not under them, which
closes `/proc/PID/environ` and `/proc/PID/mem` where it has no capabilities. Needs no privilege, but
Linux 5.13 or newer.
"""

import contextlib
import ctypes
import os
import stat
from collections.abc import Sequence

from meshwright.run.posttrain.rollout.verifiers.sandbox.linux_calls import system_call

_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_BENEATH_A_PATH = 1
_GET_VERSION = 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_READING = _EXECUTE | _READ_FILE | _READ_DIR
_ALL_OF_VERSION_1 = (1 << 13) - 1
_OF_A_FILE = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_TCP = 3
_ABSTRACT_SOCKETS_AND_SIGNALS = 3

DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/dev/full")


class _RulesetAttr(ctypes.Structure):
    _fields_ = [
        ("handled_access_fs", ctypes.c_uint64),
        ("handled_access_net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    ]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32)]


def get_landlock_version() -> int:
    """Return the version of the kernel's rules; raise `OSError` where it has none."""
    return system_call(_CREATE, None, 0, _GET_VERSION)


def create_ruleset(
    *, readable: Sequence[str] | None, writable: Sequence[str], network: bool
) -> int:
    """Return the descriptor of rules, which several processes may apply."""
    version = get_landlock_version()
    handled = _ALL_OF_VERSION_1
    for least, right in ((2, _REFER), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        handled |= right if version >= least else 0
    if readable is None:
        handled &= ~(_READING | _IOCTL_DEV)
    attr = _RulesetAttr(
        handled_access_fs=handled,
        handled_access_net=_TCP if version >= 4 and not network else 0,
        scoped=_ABSTRACT_SOCKETS_AND_SIGNALS if version >= 6 else 0,
    )
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = system_call(_CREATE, ctypes.byref(attr), size, 0)
    try:
        for path in readable or ():
            _allow(ruleset, path, _READING & handled)
        for path in DEVICES:
            _allow(ruleset, path, (_READ_FILE | _WRITE_FILE | _TRUNCATE) & handled)
        for path in writable:
            _allow(ruleset, path, handled)
    except BaseException:
        os.close(ruleset)
        raise
    return ruleset


def apply_ruleset(ruleset: int) -> None:
    """Put this process and all that it starts under rules; needs no_new_privs."""
    system_call(_RESTRICT, ruleset, 0)


def _allow(ruleset: int, path: str, rights: int) -> None:
    with contextlib.suppress(FileNotFoundError, PermissionError, NotADirectoryError):
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        try:
            if not stat.S_ISDIR(os.fstat(opened).st_mode):
                rights &= _OF_A_FILE
            rule = _PathBeneath(rights, opened)
            system_call(_ADD_RULE, ruleset, _BENEATH_A_PATH, ctypes.byref(rule), 0)
        finally:
            os.close(opened)
