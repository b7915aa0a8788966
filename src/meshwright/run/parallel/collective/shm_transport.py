"""Carries out a plan through shared memory: all ranks on one host.

Every pair of ranks has a ring of cells. A rank goes around its lanes: it fills the next cell of an
outgoing lane as soon as the frame is there and a cell is free, and takes the next cell of an
incoming lane straight to its place, adding on the way. Nothing is ordered but frames of one lane
and tasks that wait for each other, so chunks stream through as many ranks as there are.
"""

import os
import time
from collections.abc import Sequence

import torch

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
from meshwright.run.parallel.collective.shared_memory import (
    Doorbells,
    SharedMemorySegment,
    count_available_cores,
)
from meshwright.run.parallel.collective.stall_diagnosis import CollectiveStallError
from meshwright.run.parallel.collective.stall_monitor import TICK_S, StallMonitor

_YIELDS = 100
"""Times a waiting rank offers its core to others before it sleeps, where each has a core."""
_NAP_S = 1e-3


class _Lane:
    """The frames of one direction between this rank and a peer, and where the next one goes."""

    __slots__ = (
        "cells",
        "count",
        "marks",
        "numbers",
        "other",
        "own",
        "peer",
        "position",
        "sends",
    )

    def __init__(
        self,
        segment: SharedMemorySegment,
        ends: tuple[int, int],
        dtype: torch.dtype,
        numbers: list[int],
        *,
        sends: bool,
    ) -> None:
        sent, taken, self.marks = segment.get_counters(*ends)
        self.sends, self.numbers, self.position = sends, numbers, 0
        self.peer = ends[1] if sends else ends[0]
        self.own, self.other = (sent, taken) if sends else (taken, sent)
        self.count = segment.words[self.own]
        self.cells = segment.get_lane(*ends, dtype)


class ShmTransport:
    """Runs plans of one rank over a segment."""

    def __init__(
        self, segment: SharedMemorySegment, watch: StallMonitor, ledger: memoryview, rank: int
    ) -> None:
        self._segment, self._watch, self._ledger, self._rank = segment, watch, ledger, rank
        self._bells = Doorbells(segment.words, segment.doorbells, rank, _NAP_S)
        self._yields = _YIELDS if segment.ranks <= count_available_cores() else 1
        self._looked = time.monotonic()

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

        Frames carry `mark`, so that nobody takes those of another collective.
        """
        state = _State(
            self._segment,
            plan,
            tensors,
            combine,
            bells=self._bells,
            mark=mark,
            record=record,
        )
        ledger, left, idle = self._ledger, len(plan.tasks), 0
        while left:
            moved = state.go_round(ledger)
            if moved:
                left -= moved
                ledger[DONE] += moved
                if idle:
                    ledger[WAITING_FOR] = NO_VALUE
                    if idle >= self._yields:
                        self._bells.cancel_sleep()
                    idle = 0
                continue
            idle += 1
            if idle == 1:
                awaited = state.awaited()
                if awaited != NO_VALUE:
                    set_waiting_for(ledger, awaited, plan.tasks[awaited].position)
            if idle < self._yields:
                os.sched_yield()
            elif idle == self._yields:
                self._bells.prepare_sleep()  # and go around once more before sleeping
            else:
                self._bells.sleep()
                self._look()
                self._bells.prepare_sleep()

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < TICK_S:
            return
        self._looked = now
        stall = self._watch.check()
        if stall is not None:
            raise CollectiveStallError(stall, self._rank)


class _State:
    """How far a plan has come."""

    def __init__(
        self,
        segment: SharedMemorySegment,
        plan: RankPlan,
        tensors: Sequence[torch.Tensor],
        combine: CombineFn,
        *,
        bells: Doorbells,
        mark: int,
        record: CollectiveSpans | None,
    ) -> None:
        self.bells = bells
        self.words, self.cells = segment.words, segment.cells
        self.tasks, self.tensors, self.combine = plan.tasks, tensors, combine
        self.record, self.mark = record, mark
        self.followers, self.waits = plan.dependents, list(plan.dependency_counts)
        dtype, me = tensors[0].dtype, plan.rank
        self.lanes = [
            _Lane(segment, (me, peer), dtype, numbers, sends=True)
            for peer, numbers in plan.sends_by_peer
        ]
        self.lanes += [
            _Lane(segment, (peer, me), dtype, numbers, sends=False)
            for peer, numbers in plan.receives_by_peer
        ]
        self.locals = list(plan.local_tasks)

    def go_round(self, ledger: memoryview) -> int:
        """Visit every lane once; return how many tasks were done."""
        moved = 0
        for lane in self.lanes:
            number = self.send(lane) if lane.sends else self.take(lane)
            if number >= 0:
                moved += 1
                ledger[LAST] = number
        return moved + self.locals_done() if self.locals else moved

    def send(self, lane: _Lane) -> int:
        """Fill the next cell of a lane; return the task's number, or -1 where it cannot be yet."""
        if lane.position == len(lane.numbers):
            return -1
        number = lane.numbers[lane.position]
        words = self.words
        if self.waits[number] or lane.count - words[lane.other] >= self.cells:
            return -1
        began = time.time_ns() if self.record else 0
        task = self.tasks[number]
        index = lane.count % self.cells
        gather_frame(self.tensors, lane.cells[index], task.reads)
        words[lane.marks + index] = self.mark
        lane.count += 1
        words[lane.own] = lane.count
        self.bells.wake(lane.peer)
        lane.position += 1
        self._over(number, task, began)
        return number

    def take(self, lane: _Lane) -> int:
        """Empty the next cell of a lane; return the task's number, or -1 where it cannot be yet."""
        if lane.position == len(lane.numbers):
            return -1
        number = lane.numbers[lane.position]
        words = self.words
        if self.waits[number] or words[lane.other] == lane.count:
            return -1
        began = time.time_ns() if self.record else 0
        task = self.tasks[number]
        index = lane.count % self.cells
        if words[lane.marks + index] != self.mark:
            return -1  # a frame of another collective: the watch will find out whose
        scatter_frame(self.tensors, lane.cells[index], task.writes, task.bases, self.combine)
        lane.count += 1
        words[lane.own] = lane.count
        self.bells.wake(lane.peer)
        lane.position += 1
        self._over(number, task, began)
        return number

    def locals_done(self) -> int:
        """Do what stays inside the rank and waits for nothing; return how much that was."""
        ready = [number for number in self.locals if not self.waits[number]]
        for number in ready:
            began = time.time_ns() if self.record else 0
            task = self.tasks[number]
            self.locals.remove(number)
            run_local_task(self.tensors, task, self.combine)
            self._over(number, task, began)
        return len(ready)

    def awaited(self) -> int:
        """Return the earliest task that could be done but for a peer."""
        ready = (
            lane.numbers[lane.position]
            for lane in self.lanes
            if lane.position < len(lane.numbers) and not self.waits[lane.numbers[lane.position]]
        )
        return min(ready, default=NO_VALUE)

    def _over(self, number: int, task: FrameTask, began: int) -> None:
        waits = self.waits
        for follower in self.followers[number]:
            waits[follower] -= 1
        if self.record:
            self.record.span(task, began, time.time_ns())


def run_local_task(tensors: Sequence[torch.Tensor], task: FrameTask, combine: CombineFn) -> None:
    """Carry out a task that stays inside a rank."""
    for index, (tensor, start, length) in enumerate(task.reads):
        source = tensors[tensor][start : start + length]
        write = task.writes[index : index + 1]
        if task.bases or source.data_ptr() != tensors[write[0].tensor][write[0].start :].data_ptr():
            scatter_frame(tensors, source, write, task.bases[index : index + 1], combine)
