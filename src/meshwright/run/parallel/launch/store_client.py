"""`connect_store`: a rank's way to the store of rank 0, past whoever else may listen at its port.

torch's own client waits without end for a program that takes the connection and stays silent, and
fills the terminal while rank 0 is not there yet. So first the port is asked, in the store's own
words, whether it is one.
"""

import os
import socket
import struct
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from meshwright.errors import InputError, Problem
from meshwright.run.parallel.launch.config_consensus import MissingRanksError
from meshwright.run.parallel.launch.store_server import LOOPBACK, open_store_server

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

_VALIDATE, _MAGIC, _PING = 0, 0x3C85F7CE, 13
"""How a client of the store begins (torch/csrc/distributed/c10d/TCPStoreBackend.hpp); what a ping
carries comes back."""
_ANSWER_S = 15.0
"""How long rank 0 may take to answer: thousands of ranks may ask at once."""
_AGAIN_S = 0.2


def make_port_in_use_error(address: str, port: int) -> InputError:
    """Return the refusal of a port that somebody else has, the same on every rank."""
    what = f"{port} of {address} is in use by another program"
    return InputError([Problem("MASTER_PORT", what, "use another, the same for all ranks")])


def connect_store(address: str, port: int, rank: int, *, rendezvous_timeout_s: float) -> "TCPStore":
    """Connect to the store that rank 0 keeps, once it is there."""
    from torch._C._distributed_c10d import TCPStore

    until = time.monotonic() + rendezvous_timeout_s
    while (why := _unreachable(address, port, until)) and time.monotonic() < until:
        time.sleep(_AGAIN_S)
    detail = why
    if not why:
        left = timedelta(seconds=max(1.0, until - time.monotonic()))
        try:
            return TCPStore(address, port, is_master=False, timeout=left, wait_for_workers=False)
        except RuntimeError as error:
            detail = str(error).partition("\n")[0]
    raise MissingRanksError(f"rank {rank} cannot reach rank 0 at {address}:{port} ({detail})")


def _unreachable(address: str, port: int, until: float) -> str:
    """Say why nobody is there; whoever is and keeps no store is refused."""
    wait_s = max(0.1, min(_ANSWER_S, until - time.monotonic()))
    try:
        connection = socket.create_connection((address, port), timeout=wait_s)
    except OSError as error:
        return error.strerror or str(error)
    with connection:
        if not _is_store(connection) and _store_is_known():
            raise make_port_in_use_error(address, port)
    return ""


def _is_store(connection: socket.socket) -> bool:
    """Ask whoever listens whether it keeps a store."""
    connection.settimeout(_ANSWER_S)
    nonce = os.getpid() & 0xFFFFFFFF
    try:
        connection.sendall(struct.pack("=BIBI", _VALIDATE, _MAGIC, _PING, nonce))
        answer = b""
        while len(answer) < 4 and (more := connection.recv(4 - len(answer))):
            answer += more
    except OSError:
        return False
    return answer == struct.pack("=I", nonce)


def _store_is_known() -> bool:
    """Say whether a store of this torch answers as is expected here."""
    own = open_store_server()
    with socket.create_connection((LOOPBACK, own.port), timeout=_ANSWER_S) as connection:
        return _is_store(connection)
