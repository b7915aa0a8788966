"""Writes what a rank does in a collective into a timeline, as the simulator does.

One span per frame, on the lane of its link: `send to 3, channel 0`, `receive from 1, channel 0`,
or `local`. Spans and lanes have the names of a simulated collective, so that both can be laid
beside each other; only what a rank merely keeps (step -1) is copied here and not there.
"""

from typing import TYPE_CHECKING

import torch

from meshwright.policy.collective.collective import Collective
from meshwright.policy.collective.spans import CALLS, NAMES, lane_name, span_details
from meshwright.run.parallel.collective.plan import Task
from meshwright.timeline import Kind

if TYPE_CHECKING:
    from meshwright.timeline import TimelineWriter


class Record:
    """The spans of one collective on one rank."""

    def __init__(
        self, writer: "TimelineWriter", collective: Collective, dtype: torch.dtype, sequence: int
    ) -> None:
        self._writer, self._collective = writer, collective
        self._dtype, self._sequence = str(dtype).removeprefix("torch."), sequence
        self._item_bytes = dtype.itemsize
        self._frames: dict[tuple[str, int], int] = {}
        self._ends: dict[str, int] = {}

    def span(self, task: Task, start_ns: int, end_ns: int) -> None:
        """Write a task that began and ended at these times of the wall clock."""
        lane = lane_name(task.kind, task.peer, task.channel)
        # A link carries one frame at a time: one that was asked for earlier began when it was free.
        start_ns = max(start_ns, self._ends.get(lane, start_ns))
        end_ns = max(start_ns, end_ns)
        self._ends[lane] = end_ns
        flow = None if task.kind == "local" else self._flow(task)
        self._writer.span(
            NAMES[task.adds],
            start_ns,
            end_ns - start_ns,
            kind=Kind.MEMORY_COPY if task.kind == "local" else Kind.COMMUNICATION,
            lane=lane,
            bytes=task.length * self._item_bytes,
            collective=CALLS[task.kind],
            group=self._collective.op,
            dtype=self._dtype,
            flow_out=flow if task.kind == "send" else None,
            flow_in=flow if task.kind == "receive" else None,
            extra=span_details(task.step, task.slot, task.chunks),
        )

    def _flow(self, task: Task) -> int:
        """Return the number of a frame between two ranks, which both of them know."""
        count = self._frames.get((task.kind, task.peer), 0)
        self._frames[task.kind, task.peer] = count + 1
        ranks, me = self._collective.ranks, self._writer.rank
        source, target = (me, task.peer) if task.kind == "send" else (task.peer, me)
        return ((self._sequence * ranks + source) * ranks + target) << 20 | count
