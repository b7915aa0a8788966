"""A seccomp filter that refuses system calls, for x86-64 and AArch64.

It refuses what reaches into other processes or the kernel (ptrace, mount, keyctl, bpf, io_uring
and others), and depending on the configuration sockets, new processes and signals. A refused call
fails with EPERM. A process cannot remove its filter.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Iterator, Sequence

from meshwright.run.posttrain.rollout.verifiers.sandbox.linux_calls import (
    MACHINE,
    PR_SET_SECCOMP,
    prctl,
)

_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
_FILTER_MODE = 2
_X32_BIT = 0x40000000
_NEW_NAMESPACES = 0x7E020080
"""Flags of clone that make namespaces."""

_ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""The architecture's number in the kernel's audit, and its column below."""

# Sources: arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h of Linux.
_KERNEL_AND_OTHERS = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438), "kcmp": (312, 272), "process_madvise": (440, 440),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "sethostname": (170, 161),
    "setdomainname": (171, 162), "acct": (163, 89), "quotactl": (179, 60),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266),
    "adjtimex": (159, 171), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262), "syslog": (103, 116), "personality": (135, 92),
    "nfsservctl": (180, 42), "vhangup": (153, 58), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186),
    "mq_open": (240, 180), "memfd_secret": (447, 447),
}  # fmt: skip
_SOCKETS = {"socket": (41, 198)}
_NEW_PROCESSES = {
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "clone3": (435, 435),
    "execve": (59, 221), "execveat": (322, 281), "setsid": (112, 157), "setpgid": (109, 154),
}  # fmt: skip
_SIGNALS_TO_ANY = {
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "tkill": (200, 130),
    "pidfd_send_signal": (424, 424),
}  # fmt: skip
_SIGNALS_TO_A_PROCESS = {"kill": (62, 129), "tgkill": (234, 131)}
_OF_A_PROCESS = {"prlimit64": (302, 261)}
_CLONE, _CLONE3 = (56, 220), (435, 435)

Instruction = tuple[int, int, int, int]


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


def install_filter(*, processes: bool, network: bool) -> None:
    """Refuse system calls to this process and all that it starts; needs no_new_privs."""
    if MACHINE not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"system calls of {MACHINE} are not known here")
    code = list(_list_instructions(processes=processes, network=network))
    packed = b"".join(struct.pack("=HBBI", *each) for each in code)
    program = _Program(len(code), packed)
    address = ctypes.cast(ctypes.byref(program), ctypes.c_void_p).value
    assert address is not None
    prctl(PR_SET_SECCOMP, _FILTER_MODE, address)


def _list_instructions(*, processes: bool, network: bool) -> Iterator[Instruction]:
    architecture, column = _ARCHITECTURES[MACHINE]
    yield _LOAD, 0, 0, _ARCH_AT
    yield _EQUAL, 1, 0, architecture
    yield _RETURN, 0, 0, _KILL
    yield _LOAD, 0, 0, _NUMBER_AT
    if MACHINE == "x86_64":
        # The same calls under other numbers.
        yield _AT_LEAST, 0, 1, _X32_BIT
        yield _RETURN, 0, 0, _ERRNO | errno.ENOSYS
    refused = dict(_KERNEL_AND_OTHERS)
    refused |= {} if network else _SOCKETS
    refused |= {} if processes else _NEW_PROCESSES | _SIGNALS_TO_ANY
    for numbers in refused.values():
        if (number := numbers[column]) is not None:
            yield _EQUAL, 0, 1, number
            yield _RETURN, 0, 0, _ERRNO | errno.EPERM
    if processes:
        # Flags of clone3 lie in memory, where a filter cannot see them; libc then uses clone.
        yield _EQUAL, 0, 1, _CLONE3[column]
        yield _RETURN, 0, 0, _ERRNO | errno.ENOSYS
        yield from _refuse_by_argument(_CLONE[column], 0, [(_ANY_BIT, 0, 1, _NEW_NAMESPACES)])
    else:
        own = os.getpid()
        for numbers in _SIGNALS_TO_A_PROCESS.values():
            yield from _refuse_by_argument(numbers[column], 0, [(_EQUAL, 1, 0, own)])
        for numbers in _OF_A_PROCESS.values():
            allowed = [(_EQUAL, 2, 0, 0), (_EQUAL, 1, 0, own)]
            yield from _refuse_by_argument(numbers[column], 0, allowed)
    yield _RETURN, 0, 0, _ALLOW


def _refuse_by_argument(
    number: int, argument: int, tests: Sequence[Instruction]
) -> Iterator[Instruction]:
    """Refuse a call by the low half of an argument, unless a test jumps over the refusal."""
    yield _EQUAL, 0, len(tests) + 3, number
    yield _LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument
    yield from tests
    yield _RETURN, 0, 0, _ERRNO | errno.EPERM
    yield _RETURN, 0, 0, _ALLOW
