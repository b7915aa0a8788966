"""Where processes listen, read from /proc: pairs of address and port."""

import os
import re
import socket
from collections.abc import Iterable
from pathlib import Path

_LISTEN = "0A"


def list_listening_addresses(pids: Iterable[int] | None = None) -> set[tuple[str, int]]:
    """Return where TCP sockets of these processes listen; by default those of this one."""
    inodes = {inode for pid in (pids or [os.getpid()]) for inode in _socket_inodes(pid)}
    found = set()
    for family, name in ((socket.AF_INET, "tcp"), (socket.AF_INET6, "tcp6")):
        for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTEN and words[9] in inodes:
                host, port = words[1].split(":")
                found.add((_address(family, host), int(port, 16)))
    return found


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            match = re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink()))
        except OSError:
            continue
        if match:
            found.add(match[1])
    return found


def _address(family: socket.AddressFamily, text: str) -> str:
    raw = bytes.fromhex(text)
    words = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return socket.inet_ntop(family, words)
