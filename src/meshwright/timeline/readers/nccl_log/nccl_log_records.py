"""What a log of NCCL's says, as plain records: communicators, their channels, calls, warnings."""

from pathlib import Path
from typing import NamedTuple


class Communicator(NamedTuple):
    """One rank's end of a communicator."""

    host: str
    pid: int
    address: str
    """Of the object in its process: what calls name it by."""
    id: str
    """The same on all ranks; empty where an older NCCL does not say it."""
    rank: int
    num_ranks: int
    device: int
    bus_id: str
    parent: str
    init_start_ns: int | None
    init_complete_ns: int | None
    is_initialized: bool
    """Whether its making was completed."""
    is_destroyed: bool
    """Whether it was destroyed or aborted."""
    init_s: float | None
    """How long NCCL says that making it took."""
    num_nodes: int = 0
    """0 where it does not say."""
    num_channels: int = 0
    """Of its collectives; 0 where it does not say."""


class ChannelConnection(NamedTuple):
    """A channel from one rank to another."""

    communicator: str
    channel: int
    source: int
    target: int
    direction: str
    """`send` or `receive` where it goes over a network, else empty."""
    transport: str
    """Such as `NET/IB/0/GDRDMA`, `P2P/CUMEM`, `SHM/direct/direct`."""
    host: str
    pid: int


class ChannelRing(NamedTuple):
    """The ranks of one channel's ring, in order."""

    communicator: str
    channel: int
    ranks: tuple[int, ...]


class ChannelTree(NamedTuple):
    """One rank's place in a channel's tree; -1 is nobody."""

    communicator: str
    channel: int
    rank: int
    up: int
    down: tuple[int, ...]


class NcclCall(NamedTuple):
    """A collective, send or receive that the host asked for."""

    host: str
    pid: int
    tid: int
    rank: int
    """In its communicator; -1 where that was made before the log began."""
    communicator: str
    """The id, or the address in its process where the id is not known."""
    name: str
    op_count: int
    """NCCL's opCount."""
    num_elements: int
    """As NCCL was given: of one rank's part where a collective has parts."""
    dtype: str
    reduction: str
    root: int
    num_ranks: int
    device: int
    time_ns: int | None


class NcclWarning(NamedTuple):
    """A warning."""

    host: str
    pid: int
    device: int
    source: str
    message: str
    time_ns: int | None


class ProcessFact(NamedTuple):
    """What a process says of itself, once however often it says it."""

    host: str
    pid: int
    subject: str
    """`version`, `network`, `devices` (network cards), `setting`, `no rdma`, `no peers`."""
    value: str


class NcclLog(NamedTuple):
    """What a log says."""

    path: Path
    version: str
    communicators: tuple[Communicator, ...]
    connections: tuple[ChannelConnection, ...]
    rings: tuple[ChannelRing, ...]
    trees: tuple[ChannelTree, ...]
    calls: tuple[NcclCall, ...]
    warnings: tuple[NcclWarning, ...]
    notes: tuple[str, ...]
    process_facts: tuple[ProcessFact, ...] = ()
