"""`Team`: the processes that carry out collectives together, and how they reach each other."""

import uuid
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from meshwright.errors import InputError, MissingPart, Problem
from meshwright.run.parallel.collective.combine import Combine
from meshwright.run.parallel.collective.ledger import Ledger, SharedLedger, StoreLedger
from meshwright.run.parallel.collective.plan import Plan
from meshwright.run.parallel.collective.posted import PostedDriver, free
from meshwright.run.parallel.collective.record import Record
from meshwright.run.parallel.collective.segment import Segment, host_mark, usable
from meshwright.run.parallel.collective.shared import SharedDriver
from meshwright.run.parallel.collective.watch import Watch, WatchThread

Transport = Literal["auto", "shared", "torch"]


SHARED_FRAME_BYTES = 512 * 1024
POSTED_FRAME_BYTES = 2 * 1024 * 1024


class _Hello(NamedTuple):
    host: str
    token: str
    shared: bool


class Team:
    """All processes of a group; every one of them makes it, at the same point of the program.

        dist.init_process_group("gloo")
        team = Team()

    `transport` is `shared` (memory of one host), `torch` (the group's own messages) or `auto`:
    shared where all ranks are on one host and tensors are on the CPU. `patience_s` is how long a
    collective may stand still, with nobody making progress, before every rank raises an error.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        transport: Transport = "auto",
        patience_s: float = 10.0,
        frame_bytes: int | None = None,
        cells: int = 4,
    ) -> None:
        chosen = group if group is not None else dist.group.WORLD
        if chosen is None:
            fix = "call torch.distributed.init_process_group first"
            raise InputError([Problem("group", "there is no process group", fix)])
        _check(transport, patience_s, frame_bytes, cells)
        self.group: dist.ProcessGroup = chosen
        self.rank, self.ranks = dist.get_rank(chosen), dist.get_world_size(chosen)
        self.patience_s = patience_s
        self.sequence = 0
        """Number of the collective that was begun last."""
        self.agreed: set[int] = set()
        """Signatures of the calls that all ranks have compared."""
        self.proved: set[str] = set()
        """Digests of the collectives that were proved."""
        self.agreed_at = 0
        """Number of the collective at which they did so last."""
        self.broken = ""
        """Why the team can do nothing more; empty while it can."""
        hellos = self._meet(_Hello(host_mark(), uuid.uuid4().hex[:16], usable()))
        one_host = len({hello.host for hello in hellos}) == 1 and all(h.shared for h in hellos)
        if transport == "shared" and not one_host:
            what = "shared memory needs all ranks on one host with an x86 processor"
            raise MissingPart(what, "use transport='torch'")
        cpu = dist.get_backend(chosen) != "nccl"
        self.transport: Literal["shared", "torch"] = (
            "shared" if one_host and transport != "torch" and cpu else "torch"
        )
        usual_bytes = SHARED_FRAME_BYTES if self.transport == "shared" else POSTED_FRAME_BYTES
        self.frame_bytes = frame_bytes or usual_bytes
        token = hellos[0].token
        self.store: Store = PrefixStore(
            f"meshwright/{token}",
            dist.distributed_c10d._get_default_store(),  # noqa: SLF001 - torch offers no other way
        )
        self.ledger: Ledger
        self._thread: WatchThread | None = None
        if one_host:
            segment = self._map(token, cells)
            self.ledger = SharedLedger(segment, self.rank)
        else:
            self.ledger = StoreLedger(self.store, self.rank, self.ranks)
        self.watch = Watch(self.ledger, self.rank, patience_s)
        self._shared: SharedDriver | None = None
        self._posted: PostedDriver | None = None
        if self.transport == "shared":
            self._shared = SharedDriver(segment, self.watch, self.ledger.mine, self.rank)
        else:
            self._thread = WatchThread(self.watch, lambda: free(self.group, self.rank))
            self._posted = PostedDriver(self.group, self._thread, self.ledger.mine, patience_s)

    def _meet(self, hello: _Hello) -> list[_Hello]:
        answers: list[_Hello | None] = [None] * self.ranks
        dist.all_gather_object(answers, hello, group=self.group)
        return [answer for answer in answers if answer is not None]

    def _map(self, token: str, cells: int) -> Segment:
        """Map the file that rank 0 makes; its name is gone when all have."""
        size = self.frame_bytes if self.transport == "shared" else 64
        kind = {"ranks": self.ranks, "cells": cells, "cell_bytes": size}
        segment = Segment(token, **kind, make=True) if self.rank == 0 else None
        self._meet(_Hello("", token, True))
        segment = segment or Segment(token, **kind, make=False)
        self._meet(_Hello("", token, True))
        if self.rank == 0:
            segment.forget_name()
        return segment

    def carry_out(
        self,
        plan: Plan,
        tensors: Sequence[torch.Tensor],
        combine: Combine,
        *,
        signature: int,
        record: Record | None,
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
    def thread(self) -> WatchThread | None:
        """Who keeps watch while this rank is blocked in a message; None over shared memory."""
        return self._thread

    def close(self) -> None:
        """End the team's thread, if it has one."""
        if self._thread is not None:
            self._thread.close()


def _check(transport: str, patience_s: float, frame_bytes: int | None, cells: int) -> None:
    problems = []
    if transport not in ("auto", "shared", "torch"):
        fix = "use auto, shared or torch"
        problems.append(Problem("transport", f"{transport!r} is none", fix))
    if patience_s <= 0:
        problems.append(Problem("patience_s", f"{patience_s:g} s", "use more than 0"))
    if frame_bytes is not None and (frame_bytes < 64 or frame_bytes % 64):
        problems.append(Problem("frame_bytes", f"{frame_bytes}", "use a multiple of 64"))
    if cells < 1:
        problems.append(Problem("cells", f"{cells}", "use 1 or more"))
    if problems:
        raise InputError(problems)
