"""`World`: the place of this process among all, whoever started it, and how they meet.

Processes meet at a store on rank 0's host. Before any group forms there, they compare their jobs:
where two differ, every rank is refused with the same words. torch loads only when they meet.
"""

import errno
import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.run.parallel.launch.config_consensus import (
    REJECT_WAIT_S,
    MissingRanksError,
    check_config_consensus,
)
from meshwright.run.parallel.launch.launcher_env import (
    LAUNCHER_READERS,
    EnvironmentReader,
    LauncherInfo,
)
from meshwright.run.parallel.launch.store_client import connect_store, make_port_in_use_error
from meshwright.run.parallel.launch.store_server import (
    BIND_ADDRESS_VARIABLE,
    LOOPBACK,
    is_loopback,
    listen_for_nodes,
    listen_on_loopback,
    open_store_server,
    use_loopback_interface,
)

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

STORE_FD_VARIABLE = "MESHWRIGHT_STORE_FD"
"""Number of the open socket at which rank 0 keeps the store, where its starter bound the port."""

_RENDEZVOUS_TIMEOUT_S = 300.0
"""How long ranks wait for each other at the start: nodes load programs at different speeds."""
_COLLECTIVE_TIMEOUT_S = 600.0
"""How long a collective may take before torch ends the process."""


class World(NamedTuple):
    """The place of a process among those of its job."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    """Number of this process on its node: that of its GPU."""
    local_size: int = 1
    """Processes of the job on this node."""
    address: str = "127.0.0.1"
    """Host of rank 0."""
    port: int = 0
    """Port of the store there; 0 where there is nobody to meet."""

    @property
    def store_address(self) -> str:
        """Address at which ranks connect to the store: loopback where all are on one node."""
        return LOOPBACK if self.local_size == self.size else self.address


def read_world(environment: Mapping[str, str] = os.environ) -> World:
    """Read this process's place; without a launcher it is the only one."""
    given = EnvironmentReader(environment)
    places = [place for read in LAUNCHER_READERS if (place := read(given)) is not None]
    if given.problems:
        raise InputError(given.problems)
    if not places:
        return World()
    _compare(places, restarted="TORCHELASTIC_RUN_ID" in environment)
    merged = places[0]
    for other in places[1:]:
        known = {name: value for name, value in merged._asdict().items() if value is not None}
        merged = other._replace(**known)
    address, port = given.read_text("MASTER_ADDR"), given.read_number("MASTER_PORT")
    merged = merged._replace(address=address or merged.address, port=port or merged.port)
    return _whole(merged)


def _compare(places: list[LauncherInfo], restarted: bool) -> None:
    """Refuse two launchers of equally many processes that count them differently.

    torchrun numbers its processes as they come, so that below srun its numbers may be others.
    """
    counted = [place for place in places if place.launcher != "Kubernetes"]
    for other in counted[1:]:
        first = counted[0]
        if None in (first.rank, other.rank) or restarted or first.size != other.size:
            continue
        if first.rank != other.rank:
            what = f"is {first.rank}, and {other.launcher} says {other.rank} of {other.size}"
            fix = "set RANK for each process, not once for all, or unset RANK and WORLD_SIZE"
            raise InputError([Problem("RANK", what, fix)])


def _whole(place: LauncherInfo) -> World:
    """Fill in what follows from the rest, and refuse what is missing or cannot be."""
    rank, size = place.rank, place.size
    if rank is None or size is None:
        missing, there = ("RANK", "WORLD_SIZE") if rank is None else ("WORLD_SIZE", "RANK")
        fix = f"unset {there}, or start with mw train --nproc-per-node, torchrun or srun"
        raise InputError([Problem(missing, f"is not set, and {there} is", fix)])
    local_rank, local_size = place.local_rank, place.local_size
    address = place.address
    if size == 1 or (address is not None and is_loopback(address)):
        local_rank = rank if local_rank is None else local_rank
        local_size = size if local_size is None else local_size
        address = address or "127.0.0.1"
    problems = [
        Problem(name, f"is not set, and there are {size} ranks", fix)
        for name, value, fix in (
            ("LOCAL_RANK", local_rank, "set it to the number of the process on its node"),
            ("LOCAL_WORLD_SIZE", local_size, "set it to the processes on each node"),
            ("MASTER_ADDR", address, "set it to the host of rank 0, the same for all ranks"),
            ("MASTER_PORT", place.port if size > 1 else 0, "set it to a free port of that host"),
        )
        if value is None
    ]
    if local_rank is None or local_size is None or address is None or problems:
        raise InputError(problems)
    world = World(rank, size, local_rank, local_size, address, place.port or 0)
    problems = [
        Problem(name, f"{value} is not from {least} to {most}", "let the launcher set it")
        for name, value, least, most in (
            ("RANK", world.rank, 0, size - 1),
            ("LOCAL_WORLD_SIZE", world.local_size, 1, size),
            ("LOCAL_RANK", world.local_rank, 0, world.local_size - 1),
            ("MASTER_PORT", world.port, 0 if size == 1 else 1, 65535),
        )
        if not least <= value <= most
    ]
    if problems:
        raise InputError(problems)
    return world


def init_process_group(
    world: World,
    device: "torch.device | str" = "cpu",
    *,
    job: Mapping[str, object] | None = None,
    problems: Sequence[Problem] = (),
    rendezvous_timeout_s: float = _RENDEZVOUS_TIMEOUT_S,
    timeout_s: float = _COLLECTIVE_TIMEOUT_S,
    environment: Mapping[str, str] = os.environ,
) -> "torch.device":
    """Meet the other ranks, compare jobs, form the process group; return this rank's device.

    `job` has the values that must be the same everywhere, by their paths; None stands for one that
    cannot be read. `problems` is what keeps this rank from running it, of which all are told before
    they are refused. A world of one rank meets nobody and forms no group.
    """
    import torch
    import torch.distributed as dist

    found = list(problems)
    chosen = torch.device(device)
    try:
        chosen = _device(chosen, world)
    except InputError as error:
        found += error.problems
    if world.size == 1 and found:
        raise InputError(found)
    if world.size == 1:
        return chosen
    try:
        # Who has something to say will not wait long for somebody to say it to.
        wait_s = min(rendezvous_timeout_s, REJECT_WAIT_S) if found else rendezvous_timeout_s
        store = rendezvous(world, rendezvous_timeout_s=wait_s, environment=environment)
    except MissingRanksError:
        if found:
            raise InputError(found) from None
        raise
    check_config_consensus(
        store,
        world.rank,
        world.size,
        job,
        problems=found,
        rendezvous_timeout_s=rendezvous_timeout_s,
    )
    if is_loopback(world.store_address):
        use_loopback_interface()
    dist.init_process_group(
        "nccl" if chosen.type == "cuda" else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=timeout_s),
    )
    return chosen


def rendezvous(
    world: World,
    *,
    rendezvous_timeout_s: float = _RENDEZVOUS_TIMEOUT_S,
    environment: Mapping[str, str] = os.environ,
) -> "Store":
    """Open the store that all ranks share; rank 0 keeps it, or torchrun does."""
    from torch._C._distributed_c10d import PrefixStore

    if world.rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        store = open_store_server(_listen(world, environment), timeout_s=rendezvous_timeout_s)
    else:
        store = connect_store(
            world.store_address, world.port, world.rank, rendezvous_timeout_s=rendezvous_timeout_s
        )
    # A job that was started again must not meet the words of its last life.
    life = environment.get("TORCHELASTIC_RESTART_COUNT") or environment.get("SLURM_RESTART_COUNT")
    names = (environment.get("SLURM_JOB_ID"), environment.get("TORCHELASTIC_RUN_ID"), life)
    return PrefixStore("/".join(("meshwright", *(name for name in names if name))), store)


def _listen(world: World, environment: Mapping[str, str]) -> socket.socket:
    """Return the listening socket of the store: that of the starter, or one at the job's port."""
    inherited = environment.get(STORE_FD_VARIABLE, "")
    if inherited.isdecimal():
        return socket.socket(fileno=int(inherited))
    try:
        if is_loopback(world.store_address):
            return listen_on_loopback(world.port)
        bind_address = environment.get(BIND_ADDRESS_VARIABLE, "")
        return listen_for_nodes(world.address, world.port, bind_address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise make_port_in_use_error(world.address, world.port) from None
        what = f"{world.port} cannot be had on {socket.gethostname()}: {error.strerror or error}"
        fix = "use another, the same for all ranks"
        raise InputError([Problem("MASTER_PORT", what, fix)]) from None


def _device(device: "torch.device", world: World) -> "torch.device":
    import torch

    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    # A launcher that gives each process one GPU lets it see only that one.
    index = world.local_rank if count != 1 else 0
    if index >= count:
        what = (
            f"rank {world.rank} is process {world.local_rank} of its node, which has {count} GPUs"
        )
        raise InputError([Problem("LOCAL_RANK", what, "start one process for each GPU")])
    chosen = torch.device("cuda", index)
    torch.cuda.set_device(chosen)
    return chosen
