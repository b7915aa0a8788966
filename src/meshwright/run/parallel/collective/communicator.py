"""`RankCommunicator`: the processes of a collective and the transports between them."""

import uuid
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from meshwright.errors import InputError, MissingDependency, Problem
from meshwright.run.parallel.collective.collective_spans import CollectiveSpans
from meshwright.run.parallel.collective.p2p_transport import P2PTransport, unblock
from meshwright.run.parallel.collective.progress_table import (
    ProgressTable,
    ShmProgressTable,
    StoreProgressTable,
)
from meshwright.run.parallel.collective.rank_plan import RankPlan
from meshwright.run.parallel.collective.reduction import CombineFn
from meshwright.run.parallel.collective.shared_memory import (
    SharedMemorySegment,
    get_host_id,
    is_available,
)
from meshwright.run.parallel.collective.shm_transport import ShmTransport
from meshwright.run.parallel.collective.stall_monitor import StallMonitor, StallMonitorThread

Transport = Literal["auto", "shm", "torch"]


SHM_FRAME_BYTES = 512 * 1024
P2P_FRAME_BYTES = 2 * 1024 * 1024


class _Hello(NamedTuple):
    host: str
    token: str
    shared: bool


class RankCommunicator:
    """All processes of a group; every one of them makes it, at the same point of the program.

        dist.init_process_group("gloo")
        team = RankCommunicator()

    `transport` is `shm` (memory of one host), `torch` (the group's own messages) or `auto`:
    shared where all ranks are on one host and tensors are on the CPU. `timeout_s` is how long a
    collective may stand still, with nobody making progress, before every rank raises an error.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        transport: Transport = "auto",
        timeout_s: float = 10.0,
        frame_bytes: int | None = None,
        cells: int = 4,
    ) -> None:
        chosen = group if group is not None else dist.group.WORLD
        if chosen is None:
            fix = "call torch.distributed.init_process_group first"
            raise InputError([Problem("group", "there is no process group", fix)])
        _check(transport, timeout_s, frame_bytes, cells)
        self.group: dist.ProcessGroup = chosen
        self.rank, self.ranks = dist.get_rank(chosen), dist.get_world_size(chosen)
        self.timeout_s = timeout_s
        self.sequence = 0
        """Number of the collective that was begun last."""
        self.checked_signatures: set[int] = set()
        """Signatures of the calls that all ranks have compared."""
        self.verified_collectives: set[str] = set()
        """Digests of the collectives that were proved."""
        self.checked_at_sequence = 0
        """Number of the collective at which they did so last."""
        self.failure = ""
        """Why the team can do nothing more; empty while it can."""
        hellos = self._meet(_Hello(get_host_id(), uuid.uuid4().hex[:16], is_available()))
        one_host = len({hello.host for hello in hellos}) == 1 and all(h.shared for h in hellos)
        if transport == "shm" and not one_host:
            what = "shared memory needs all ranks on one host with an x86 processor"
            raise MissingDependency(what, "use transport='torch'")
        cpu = dist.get_backend(chosen) != "nccl"
        self.transport: Literal["shm", "torch"] = (
            "shm" if one_host and transport != "torch" and cpu else "torch"
        )
        usual_bytes = SHM_FRAME_BYTES if self.transport == "shm" else P2P_FRAME_BYTES
        self.frame_bytes = frame_bytes or usual_bytes
        token = hellos[0].token
        self.store: Store = PrefixStore(
            f"meshwright/{token}",
            dist.distributed_c10d._get_default_store(),  # noqa: SLF001 - torch offers no other way
        )
        self.progress_table: ProgressTable
        self._thread: StallMonitorThread | None = None
        if one_host:
            segment = self._map(token, cells)
            self.progress_table = ShmProgressTable(segment, self.rank)
        else:
            self.progress_table = StoreProgressTable(self.store, self.rank, self.ranks)
        self.stall_monitor = StallMonitor(self.progress_table, self.rank, timeout_s)
        self._shared: ShmTransport | None = None
        self._posted: P2PTransport | None = None
        if self.transport == "shm":
            self._shared = ShmTransport(
                segment, self.stall_monitor, self.progress_table.own_row, self.rank
            )
        else:
            self._thread = StallMonitorThread(
                self.stall_monitor, lambda: unblock(self.group, self.rank)
            )
            self._posted = P2PTransport(
                self.group, self._thread, self.progress_table.own_row, timeout_s
            )

    def _meet(self, hello: _Hello) -> list[_Hello]:
        answers: list[_Hello | None] = [None] * self.ranks
        dist.all_gather_object(answers, hello, group=self.group)
        return [answer for answer in answers if answer is not None]

    def _map(self, token: str, cells: int) -> SharedMemorySegment:
        """Map the file that rank 0 makes; its name is gone when all have."""
        size = self.frame_bytes if self.transport == "shm" else 64
        kind = {"ranks": self.ranks, "cells": cells, "cell_bytes": size}
        segment = SharedMemorySegment(token, **kind, make=True) if self.rank == 0 else None
        self._meet(_Hello("", token, True))
        segment = segment or SharedMemorySegment(token, **kind, make=False)
        self._meet(_Hello("", token, True))
        if self.rank == 0:
            segment.unlink()
        return segment

    def run_plan(
        self,
        plan: RankPlan,
        tensors: Sequence[torch.Tensor],
        combine: CombineFn,
        *,
        signature: int,
        record: CollectiveSpans | None,
    ) -> None:
        """Move the data of a collective that was begun."""
        # Odd, so that different numbers of one signature stay different.
        mark = (signature + 0x9E3779B1 * self.sequence) % 2**62
        if self._shared is not None and tensors[0].device.type == "cpu":
            self._shared.run(plan, tensors, combine, mark=mark, record=record)
        elif self._posted is not None:
            self._posted.run(plan, tensors, combine, mark=mark, record=record)
        else:
            what = f"shared memory of the host does not reach {tensors[0].device}"
            raise InputError([Problem("transport", what, "use transport='torch'")])

    @property
    def monitor_thread(self) -> StallMonitorThread | None:
        """Who keeps watch while this rank is blocked in a message; None over shared memory."""
        return self._thread

    def close(self) -> None:
        """End the team's thread, if it has one."""
        if self._thread is not None:
            self._thread.close()


def _check(transport: str, timeout_s: float, frame_bytes: int | None, cells: int) -> None:
    problems = []
    if transport not in ("auto", "shm", "torch"):
        fix = "use auto, shared or torch"
        problems.append(Problem("transport", f"{transport!r} is none", fix))
    if timeout_s <= 0:
        problems.append(Problem("timeout_s", f"{timeout_s:g} s", "use more than 0"))
    if frame_bytes is not None and (frame_bytes < 64 or frame_bytes % 64):
        problems.append(Problem("frame_bytes", f"{frame_bytes}", "use a multiple of 64"))
    if cells < 1:
        problems.append(Problem("cells", f"{cells}", "use 1 or more"))
    if problems:
        raise InputError(problems)
