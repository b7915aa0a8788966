"""Namespaces: users, mounts, processes, network, IPC and host name of their own.

Where the process is not allowed to make them, it first makes a user namespace, in which it is.
Each is tried by itself: containers and distributions refuse some of them.
"""

import contextlib
import os
from pathlib import Path

from meshwright.run.posttrain.rollout.verifiers.sandbox.linux_calls import (
    CLONE_NEWIPC,
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWPID,
    CLONE_NEWUSER,
    CLONE_NEWUTS,
    MS_BIND,
    MS_NODEV,
    MS_NOEXEC,
    MS_NOSUID,
    MS_PRIVATE,
    MS_REC,
    mount,
    set_read_only,
    set_writable,
    unmount,
    unshare,
)
from meshwright.run.posttrain.rollout.verifiers.sandbox.sandbox_config import (
    LayerRecord,
    SandboxConfig,
)

FOLDER_BYTES = 64 << 20
"""What all files of a check may take."""
SHARED_MEMORY = "/dev/shm"
_MOST_FILES = 4096
_KINDS = {
    "mount namespace": CLONE_NEWNS,
    "PID namespace": CLONE_NEWPID,
    "IPC namespace": CLONE_NEWIPC,
    "host name namespace": CLONE_NEWUTS,
}


def enter_namespaces(config: SandboxConfig, record: LayerRecord) -> None:
    """Make the namespaces that the system grants; the next child is the first of its PIDs."""
    kinds = dict(_KINDS)
    if not config.network:
        kinds["network namespace"] = CLONE_NEWNET
    try:
        unshare(CLONE_NEWNS)
    except OSError:
        if not _enter_user_namespace(record):
            return
    for name, flag in kinds.items():
        try:
            unshare(flag)
            record.add(name)
        except OSError as error:
            record.refuse(name, error)


def _enter_user_namespace(record: LayerRecord) -> bool:
    user, group = os.geteuid(), os.getegid()
    try:
        unshare(CLONE_NEWUSER)
        for name, text in (
            ("setgroups", "deny"),
            ("gid_map", f"{group} {group} 1"),
            ("uid_map", f"{user} {user} 1"),
        ):
            Path(f"/proc/self/{name}").write_text(text, encoding="ascii")
    except OSError as error:
        record.refuse("user namespace", error)
        return False
    record.add("user namespace")
    return True


def mount_private_files(config: SandboxConfig, record: LayerRecord) -> None:
    """Mount files of its own; for the first process of a PID namespace, in a mount namespace."""
    if "mount namespace" not in record.active:
        return
    try:
        unshare(CLONE_NEWNS)  # who keeps the sandbox goes on seeing the folder below
        mount("none", "/", flags=MS_REC | MS_PRIVATE)
    except OSError as error:
        record.refuse("read-only mounts", error)
        return
    if "PID namespace" in record.active:
        try:
            mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
            record.add("own /proc")
        except OSError as error:
            record.refuse("own /proc", error)
    folders = [config.folder]
    try:
        mount_empty(config.folder)
        record.add("bounded disk")
        if not Path(config.folder).is_relative_to(SHARED_MEMORY):  # it would hide the folder
            with contextlib.suppress(OSError):
                mount_empty(SHARED_MEMORY)
                record.add("own shared memory")
                folders.append(SHARED_MEMORY)
    except OSError as error:
        record.refuse("bounded disk", error)
    _write_protect(config, folders, record)


def mount_empty(folder: str) -> None:
    """Mount an empty file system of bounded size over a folder."""
    options = f"size={FOLDER_BYTES},nr_inodes={_MOST_FILES},mode=1777"
    mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, options)


def mount_empty_again(folder: str) -> None:
    """Replace what lies in a mounted folder by nothing."""
    unmount(folder)
    mount_empty(folder)


def _write_protect(config: SandboxConfig, folders: list[str], record: LayerRecord) -> None:
    try:
        for path in config.writable:
            mount(path, path, flags=MS_BIND)
        if "bounded disk" not in record.active:
            mount(config.folder, config.folder, flags=MS_BIND)
        set_read_only("/", recursive=True)
        for path in (*folders, *config.writable):
            set_writable(path)
        record.add("read-only mounts")
    except OSError as error:
        record.refuse("read-only mounts", error)
