"""Carries out a plan with torch.distributed: sends and receives that are posted, then waited for.

Works over any backend with point-to-point messages: gloo, NCCL. Tasks are posted in the order of
the plan, those of one step and frame number as one batch, which NCCL needs. A receive that adds
lands in a staging tensor first; one that copies lands in its place. Nothing is waited for before
somebody needs it, so later frames travel while earlier ones are added.

No rank waits for a message of a later step than its own, so ranks cannot wait in a circle.
"""

import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import groupby

import torch
import torch.distributed as dist

from meshwright.run.parallel.collective.collective_spans import CollectiveSpans
from meshwright.run.parallel.collective.progress_table import (
    DONE,
    LAST,
    NO_VALUE,
    WAITING_FOR,
    set_waiting_for,
)
from meshwright.run.parallel.collective.rank_plan import FrameTask, RankPlan
from meshwright.run.parallel.collective.reduction import CombineFn, gather_frame, scatter_frame
from meshwright.run.parallel.collective.shm_transport import run_local_task
from meshwright.run.parallel.collective.stall_diagnosis import CollectiveStallError
from meshwright.run.parallel.collective.stall_monitor import StallMonitorThread

_FREEING_TAG = 2**30
"""A tag that no message has."""


class P2PTransport:
    """Runs plans of one rank over a process group."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        watch: StallMonitorThread,
        ledger: memoryview,
        timeout_s: float,
    ) -> None:
        self._group, self._watch, self._ledger = group, watch, ledger
        self._rank = dist.get_rank(group)
        # Now and then gloo forgets a message whose connection was closed, and the watch cannot
        # free us. NCCL would let the host wait for the device, so there it has no limit.
        gloo = dist.get_backend(group) == "gloo"
        self._limit = timedelta(seconds=3 * timeout_s + 5) if gloo else None
        self._staging = _Staging()

    def run(
        self,
        plan: RankPlan,
        tensors: Sequence[torch.Tensor],
        combine: CombineFn,
        *,
        mark: int,
        record: CollectiveSpans | None = None,
    ) -> None:
        """Carry out a plan; raises `CollectiveStallError` where others do not take part.

        Messages carry `mark` as their tag: gloo ends the process where a message of another
        collective, and so of another size, meets a receive.
        """
        run = _Posting(
            self._group,
            plan,
            tensors,
            combine,
            tag=mark % _FREEING_TAG,
            limit=self._limit,
            ledger=self._ledger,
            staging=self._staging,
            record=record,
        )
        try:
            run.all()
        except RuntimeError as error:
            # gloo closes its connections when a peer is gone or the watch frees us.
            stall = self._watch.diagnosis()
            if stall is None:
                raise
            raise CollectiveStallError(stall, self._rank) from error


def unblock(group: dist.ProcessGroup, rank: int) -> None:
    """Wake up a thread that is blocked in a message of this group; the group is lost by it."""
    if dist.get_backend(group) != "gloo":
        group.abort()
        return
    # gloo cannot cancel a wait. But when one wait runs out of time, it closes all connections of
    # the group, and every other wait ends with an error.
    for peer in range(dist.get_world_size(group)):
        if peer == rank:
            continue
        try:
            work = dist.irecv(torch.empty(1), group_src=peer, group=group, tag=_FREEING_TAG)
        except RuntimeError:
            continue  # this connection is closed already; try to close the others
        try:
            if work is not None:
                work.wait(timedelta(milliseconds=1))
        except RuntimeError:
            return


class _Staging:
    """Tensors for frames that are added when they are there; used again and again."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}

    def take(self, length: int, like: torch.Tensor) -> torch.Tensor:
        free = self._free.setdefault((like.dtype, like.device), [])
        for index in range(len(free) - 1, -1, -1):
            if free[index].numel() >= length:
                return free.pop(index)
        return torch.empty(length, dtype=like.dtype, device=like.device)

    def give_back(self, tensor: torch.Tensor) -> None:
        self._free.setdefault((tensor.dtype, tensor.device), []).append(tensor)


class _Posting:
    """One collective under way."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        plan: RankPlan,
        tensors: Sequence[torch.Tensor],
        combine: CombineFn,
        *,
        tag: int,
        limit: timedelta | None,
        ledger: memoryview,
        staging: _Staging,
        record: CollectiveSpans | None,
    ) -> None:
        self._group, self._tasks, self._tensors = group, plan.tasks, tensors
        self._combine, self._ledger, self._staging = combine, ledger, staging
        self._record, self._tag, self._limit = record, tag, limit
        self._over = [False] * len(plan.tasks)
        self._works: list[dist.Work | None] = [None] * len(plan.tasks)
        self._frames: list[torch.Tensor | None] = [None] * len(plan.tasks)
        self._began = [0] * len(plan.tasks) if record else []

    def all(self) -> None:
        """Post every task in its turn, then wait for those nobody needed."""
        batches = groupby(range(len(self._tasks)), key=lambda number: self._tasks[number].batch_key)
        for _, numbers in batches:
            self._post(list(numbers))
        for number in range(len(self._tasks)):
            self._finish(number)

    def _post(self, numbers: list[int]) -> None:
        asked: list[dist.P2POp] = []
        posted: list[int] = []
        for number in numbers:
            task = self._tasks[number]
            if task.kind == "local":
                self._finish(number)
                continue
            frame = self._frame(number, task)
            post = dist.isend if task.kind == "send" else dist.irecv
            asked.append(
                dist.P2POp(post, frame, group=self._group, tag=self._tag, group_peer=task.peer)
            )
            posted.append(number)
            if self._record:
                self._began[number] = time.time_ns()
        if not asked:
            return
        set_waiting_for(self._ledger, posted[0], self._tasks[posted[0]].position)
        works = dist.batch_isend_irecv(asked)
        if len(works) == len(posted):
            for number, work in zip(posted, works, strict=True):
                self._works[number] = work
        else:  # NCCL answers with one handle for the whole batch
            for number in posted:
                self._works[number] = works[0]
        self._ledger[WAITING_FOR] = NO_VALUE

    def _frame(self, number: int, task: FrameTask) -> torch.Tensor:
        """Return the tensor that a message is sent from, or lands in."""
        runs = task.reads or task.writes
        staged = bool(task.bases) or len(runs) > 1
        if task.kind == "send" or not staged:
            for before in task.dependencies:
                self._finish(before)
        if not staged:
            tensor, start, length = runs[0]
            return self._tensors[tensor][start : start + length]
        frame = self._staging.take(task.num_elements, self._tensors[0])
        self._frames[number] = frame
        if task.kind == "send":
            gather_frame(self._tensors, frame, task.reads)
        return frame[: task.num_elements]

    def _finish(self, number: int) -> None:
        """Bring a task to its end, and those it waits for before it."""
        if self._over[number]:
            return
        stack = [number]
        while stack:
            top = stack[-1]
            before = [one for one in self._tasks[top].dependencies if not self._over[one]]
            if before:
                stack += before
                continue
            stack.pop()
            if not self._over[top]:
                self._end(top)

    def _end(self, number: int) -> None:
        task, work, ledger = self._tasks[number], self._works[number], self._ledger
        began = self._began[number] if self._record else 0
        if work is not None:
            set_waiting_for(ledger, number, task.position)
            if self._limit is None:
                work.wait()
            else:
                work.wait(self._limit)
            ledger[WAITING_FOR] = NO_VALUE
            self._works[number] = None
        elif self._record:
            began = time.time_ns()
        frame = self._frames[number]
        if task.kind == "local":
            run_local_task(self._tensors, task, self._combine)
        elif frame is not None:
            if task.kind == "receive":
                scatter_frame(self._tensors, frame, task.writes, task.bases, self._combine)
            self._staging.give_back(frame)
            self._frames[number] = None
        self._over[number] = True
        ledger[LAST] = number
        ledger[DONE] += 1
        if self._record:
            self._record.span(task, began, time.time_ns())
