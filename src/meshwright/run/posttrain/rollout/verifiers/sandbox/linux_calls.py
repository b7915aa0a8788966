"""System calls of Linux that the standard library does not have; each raises `OSError`."""

import ctypes
import os
import platform
import sys

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_NOSUID, MS_NODEV, MS_NOEXEC = 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

_MOUNT_SETATTR = 442
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_ATTR_READ_ONLY = 1

MACHINE = platform.machine()
IS_LINUX = sys.platform == "linux"

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttr(ctypes.Structure):
    _fields_ = [
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    ]


def system_call(number: int, *arguments: object) -> int:
    """Make a system call by its number."""
    _require_linux()
    # As long as a register: libc takes each from one.
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _check(_libc.syscall(ctypes.c_long(number), *words))


def prctl(option: int, *arguments: int) -> int:
    """Change how the kernel treats this process."""
    _require_linux()
    words = [ctypes.c_ulong(each) for each in (*arguments, 0, 0, 0, 0)[:4]]
    return _check(_libc.prctl(option, *words))


def unshare(flags: int) -> None:
    """Put this process into new namespaces."""
    _require_linux()
    _check(_libc.unshare(flags))


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount a file system, or change a mount."""
    _require_linux()
    words = [each.encode() or None for each in (source, target, kind)]
    _check(_libc.mount(*words, ctypes.c_ulong(flags), options.encode() or None))


def unmount(target: str) -> None:
    """Take a mount away, also where files of it are open."""
    _require_linux()
    _check(_libc.umount2(target.encode(), MNT_DETACH))


def set_read_only(target: str, *, recursive: bool) -> None:
    """Refuse changes to the files of a mount."""
    _set_mount(target, _MountAttr(attr_set=_ATTR_READ_ONLY), recursive=recursive)


def set_writable(target: str) -> None:
    """Allow changes to the files of a mount again."""
    _set_mount(target, _MountAttr(attr_clr=_ATTR_READ_ONLY), recursive=False)


def _set_mount(target: str, attr: _MountAttr, *, recursive: bool) -> None:
    flags = _AT_RECURSIVE if recursive else 0
    size = ctypes.sizeof(attr)
    path = ctypes.c_char_p(target.encode())
    system_call(_MOUNT_SETATTR, _AT_FDCWD, path, flags, ctypes.byref(attr), size)


def _require_linux() -> None:
    if not IS_LINUX:
        raise OSError(38, "this system is not Linux")


def _check(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result
