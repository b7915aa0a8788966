"""Writes what a rank does in a collective into a timeline, as the simulator does.

One span per frame, on the lane of its link: `send to 3, channel 0`, `receive from 1, channel 0`,
or `local`. Lanes, steps and slots have the names of a simulated collective, so that both can be
laid beside each other.
"""

import msgspec
import torch

from meshwright.policy.collective.collective import Collective
from meshwright.run.parallel.collective.plan import Task
from meshwright.timeline import Kind, TimelineWriter

_CALLS = {"send": "send", "receive": "recv", "local": None}


class Record:
    """The spans of one collective on one rank."""

    def __init__(
        self, writer: TimelineWriter, collective: Collective, dtype: torch.dtype, sequence: int
    ) -> None:
        self._writer, self._collective = writer, collective
        self._dtype, self._sequence = str(dtype).removeprefix("torch."), sequence
        self._item_bytes = dtype.itemsize
        self._frames: dict[tuple[str, int], int] = {}
        self._ends: dict[str, int] = {}

    def span(self, task: Task, start_ns: int, end_ns: int) -> None:
        """Write a task that began and ended at these times of the wall clock."""
        lane = lane_of(task)
        # A link carries one frame at a time: one that was asked for earlier began when it was free.
        start_ns = max(start_ns, self._ends.get(lane, start_ns))
        end_ns = max(start_ns, end_ns)
        self._ends[lane] = end_ns
        flow = None if task.kind == "local" else self._flow(task)
        extra = msgspec.json.encode({"step": task.step, "slot": task.slot, "chunk": task.chunk})
        self._writer.span(
            "send" if task.kind == "send" else "add" if task.adds else "copy",
            start_ns,
            end_ns - start_ns,
            kind=Kind.MEMORY_COPY if task.kind == "local" else Kind.COMMUNICATION,
            lane=lane,
            bytes=task.length * self._item_bytes,
            collective=_CALLS[task.kind],
            group=self._collective.op,
            dtype=self._dtype,
            flow_out=flow if task.kind == "send" else None,
            flow_in=flow if task.kind == "receive" else None,
            extra=extra.decode(),
        )

    def _flow(self, task: Task) -> int:
        """Return the number of a frame between two ranks, which both of them know."""
        count = self._frames.get((task.kind, task.peer), 0)
        self._frames[task.kind, task.peer] = count + 1
        ranks, me = self._collective.ranks, self._writer.rank
        source, target = (me, task.peer) if task.kind == "send" else (task.peer, me)
        return ((self._sequence * ranks + source) * ranks + target) << 20 | count


def lane_of(task: Task) -> str:
    """Return the lane a task is drawn on."""
    if task.kind == "local":
        return "local"
    way = "send to" if task.kind == "send" else "receive from"
    return f"{way} {task.peer}, channel {task.channel}"
