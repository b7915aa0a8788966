"""`open_store_server`: a store that listens at chosen addresses of this machine and no others.

torch's `TCPStore` listens at every address of its host, whatever name it is given, and asks nobody
for a password. So the socket is bound here and handed over. `use_loopback_interface` does the same
for the connections that gloo and NCCL open between ranks of one machine.
"""

import errno
import os
import socket
import sys
from collections.abc import MutableMapping
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOPBACK = "127.0.0.1"
BIND_ADDRESS_VARIABLE = "MESHWRIGHT_STORE_BIND"
"""Address at which rank 0 of several nodes listens; 0.0.0.0 stands for every one."""
_BACKLOG = 2048
"""Connections that may wait: thousands of ranks come at once."""
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def open_store_server(
    listener: socket.socket | None = None,
    *,
    world_size: int | None = None,
    timeout_s: float = 300.0,
) -> "TCPStore":
    """Open a store at a listening socket, which it then owns; by default at a free loopback port.

    It does not wait for other ranks.
    """
    from torch._C._distributed_c10d import TCPStore

    own = listener if listener is not None else listen_on_loopback()
    host, port = own.getsockname()[:2]
    return TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=own.detach(),
    )


def listen_on_loopback(port: int = 0) -> socket.socket:
    """Listen at a port of this machine that other machines cannot reach; 0 takes a free one."""
    return socket.create_server((LOOPBACK, port), backlog=_BACKLOG)


def listen_for_nodes(address: str, port: int, bind_address: str = "") -> socket.socket:
    """Listen where ranks on other nodes connect: at the addresses of this host's name only.

    A name of this host that leads to loopback here leads elsewhere on the other nodes, and an
    address that is not of this host is translated on the way: every address is listened at then.
    """
    if bind_address:
        return _listen(bind_address, port)
    for family, host in _resolve(address, port):
        if is_loopback(host):
            continue
        try:
            return socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return _listen_everywhere(port)


def _listen_everywhere(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise
    return _listen("", port)  # IPv6 is turned off


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=_BACKLOG)


def _resolve(address: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys((family, str(place[0])) for family, _, _, _, place in found))


def is_loopback(address: str) -> bool:
    """Tell whether an address is one that only this machine reaches."""
    return address in ("localhost", "::1") or address.startswith("127.")


def use_loopback_interface(environment: MutableMapping[str, str] | None = None) -> None:
    """Let gloo and NCCL of this process meet ranks of the same machine over loopback.

    They listen at the address of the host's name otherwise, which other machines reach. A variable
    that the user has set stays.
    """
    if sys.platform == "linux":
        for name in _INTERFACE_VARIABLES:
            (os.environ if environment is None else environment).setdefault(name, "lo")
