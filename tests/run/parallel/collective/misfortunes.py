"""What the ranks of the failure tests do: one of them dies, sleeps or strays."""

import os
import signal
import threading
import time

import torch
import torch.distributed as dist

from meshwright.policy.collective import build_algorithm
from meshwright.run.parallel.collective import (
    CollectiveExecutor,
    CollectiveStallError,
    RankCommunicator,
)
from meshwright.run.parallel.collective import communicator as team_module
from meshwright.run.parallel.collective.communicator import Transport
from meshwright.run.parallel.collective.stall_diagnosis import CollectiveStall

PATIENCE_S = 1.5
VICTIM = 1


def _forever(ring: CollectiveExecutor, tensor: torch.Tensor) -> None:
    until = time.monotonic() + 20
    while time.monotonic() < until:
        ring.run_in_place(tensor.zero_())


def signalled_mid_way(transport: Transport, number: int) -> None:
    """Run collectives without end; the victim gets a signal in the middle of one."""
    team = RankCommunicator(transport=transport, timeout_s=PATIENCE_S)
    ring = CollectiveExecutor(build_algorithm("ring", "all_reduce", team.ranks), team)
    tensor = torch.zeros(1 << 20)
    ring.run_in_place(tensor)
    victim = team.progress_table.read()[VICTIM].pid
    if team.rank == VICTIM:
        threading.Timer(0.3, os.kill, (os.getpid(), number)).start()
    try:
        _forever(ring, tensor)
    finally:
        if number == signal.SIGSTOP and team.rank == 0:
            os.kill(victim, signal.SIGCONT)


def oversleeps(transport: Transport) -> tuple[CollectiveStall, float] | None:
    """Run one collective together; then the victim comes too late for the next."""
    team = RankCommunicator(transport=transport, timeout_s=PATIENCE_S)
    ring = CollectiveExecutor(build_algorithm("ring", "all_reduce", team.ranks), team)
    tensor = torch.zeros(1000)
    ring.run_in_place(tensor)
    if team.rank == VICTIM:
        time.sleep(2 * PATIENCE_S)
    began = time.monotonic()
    try:
        ring.run_in_place(tensor)
    except CollectiveStallError as error:
        return error.stall, time.monotonic() - began
    return None


def dies_on_another_host(transport: Transport) -> None:
    """As if every rank had a host of its own: no shared memory, no process numbers."""
    team_module.get_host_id = lambda: f"host {dist.get_rank()}"  # type: ignore[attr-defined]
    signalled_mid_way(transport, signal.SIGKILL)


def oversleeps_on_another_host(transport: Transport) -> tuple[CollectiveStall, float] | None:
    """Come too late, on a host of its own."""
    team_module.get_host_id = lambda: f"host {dist.get_rank()}"  # type: ignore[attr-defined]
    return oversleeps(transport)


def strays(transport: Transport) -> None:
    """Run two collectives together; then the victim runs the second where all run the first."""
    team = RankCommunicator(transport=transport, timeout_s=PATIENCE_S)
    ring = CollectiveExecutor(build_algorithm("ring", "all_reduce", team.ranks), team)
    spread = CollectiveExecutor(build_algorithm("chain", "broadcast", team.ranks), team)
    tensor = torch.zeros(1000)
    ring.run_in_place(tensor)
    spread.run_in_place(tensor)
    (spread if team.rank == VICTIM else ring).run_in_place(tensor)


def brings_another_size(transport: Transport) -> str:
    """Call with unequal sizes, which is refused; then with equal ones, which goes on."""
    team = RankCommunicator(transport=transport, timeout_s=PATIENCE_S)
    ring = CollectiveExecutor(build_algorithm("ring", "all_reduce", team.ranks), team)
    said = ""
    try:
        ring.run_in_place(torch.zeros(2000 if team.rank == VICTIM else 1000))
    except ValueError as error:
        said = str(error)
    total = ring.run(torch.ones(10))
    assert total is not None
    assert total.tolist() == [team.ranks] * 10
    return said


def never_comes(transport: Transport) -> None:
    """The victim ends before the first collective."""
    team = RankCommunicator(transport=transport, timeout_s=PATIENCE_S)
    if team.rank == VICTIM:
        os._exit(3)
    CollectiveExecutor(build_algorithm("ring", "all_reduce", team.ranks), team).run_in_place(
        torch.zeros(1000)
    )


def goes_on_after_a_stall(transport: Transport) -> str:
    """Try to use a team that gave up."""
    team = RankCommunicator(transport=transport, timeout_s=0.5)
    ring = CollectiveExecutor(build_algorithm("ring", "all_reduce", team.ranks), team)
    if team.rank == VICTIM:
        time.sleep(2.5)
        return ""
    for _ in range(2):
        try:
            ring.run_in_place(torch.zeros(10))
        except CollectiveStallError:
            continue
        except ValueError as error:
            return str(error)
    return "nothing was raised"
