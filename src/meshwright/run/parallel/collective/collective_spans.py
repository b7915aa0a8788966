"""Writes what a rank does in a collective into a timeline, as the simulator does.

One span per frame, on the lane of its link: `send to 3, channel 0`, `receive from 1, channel 0`,
or `local`. Spans and lanes have the names of a simulated collective, so that both can be laid
beside each other; only what a rank merely keeps (step -1) is copied here and not there.
"""

from typing import TYPE_CHECKING

import torch

from meshwright.policy.collective.collective import Collective
from meshwright.policy.collective.collective_spans import (
    SPAN_NAMES,
    TORCH_CALLS,
    encode_span_details,
    format_lane_name,
)
from meshwright.run.parallel.collective.rank_plan import FrameTask
from meshwright.timeline import SpanKind

if TYPE_CHECKING:
    from meshwright.timeline import TimelineWriter


class CollectiveSpans:
    """The spans of one collective on one rank."""

    def __init__(
        self, writer: "TimelineWriter", collective: Collective, dtype: torch.dtype, sequence: int
    ) -> None:
        self._writer, self._collective = writer, collective
        self._dtype, self._sequence = str(dtype).removeprefix("torch."), sequence
        self._item_bytes = dtype.itemsize
        self._frames: dict[tuple[str, int], int] = {}
        self._ends: dict[str, int] = {}

    def span(self, task: FrameTask, start_ns: int, end_ns: int) -> None:
        """Write a task that began and ended at these times of the wall clock."""
        lane = format_lane_name(task.kind, task.peer, task.channel)
        # A link carries one frame at a time: one that was asked for earlier began when it was free.
        start_ns = max(start_ns, self._ends.get(lane, start_ns))
        end_ns = max(start_ns, end_ns)
        self._ends[lane] = end_ns
        flow = None if task.kind == "local" else self._flow(task)
        self._writer.span(
            SPAN_NAMES[task.reduces],
            start_ns,
            end_ns - start_ns,
            kind=SpanKind.MEMORY_COPY if task.kind == "local" else SpanKind.COMMUNICATION,
            lane=lane,
            bytes=task.num_elements * self._item_bytes,
            collective=TORCH_CALLS[task.kind],
            group=self._collective.op,
            dtype=self._dtype,
            flow_out=flow if task.kind == "send" else None,
            flow_in=flow if task.kind == "receive" else None,
            extra=encode_span_details(task.step, task.first_slot, task.num_chunks),
        )

    def _flow(self, task: FrameTask) -> int:
        """Return the number of a frame between two ranks, which both of them know."""
        count = self._frames.get((task.kind, task.peer), 0)
        self._frames[task.kind, task.peer] = count + 1
        ranks, me = self._collective.ranks, self._writer.rank
        source, target = (me, task.peer) if task.kind == "send" else (task.peer, me)
        return ((self._sequence * ranks + source) * ranks + target) << 20 | count
