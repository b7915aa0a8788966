"""Reads the pages on which watched processes write their steps."""

import mmap
import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshwright.observe.statistics.change_points import Floats
from meshwright.observe.watch.agent.shared_pages import CAPTURED, HEAD, HEAD_BYTES, MAGIC

_RECORD = np.dtype([("ended_ns", "<u8"), ("own_us", "<u4"), ("mark", "<u4")])


class StepPageHeader(NamedTuple):
    """The head of a page."""

    magic: bytes
    pid: int
    rank: int
    capacity: int
    state: int
    num_steps: int
    started_ns: int
    overhead_ns: int
    num_captures: int
    capture_cost_ns: int
    last_answered_request: int


class StepDurations(NamedTuple):
    """Steps and how long they took, without the time of the agent."""

    step_number: npt.NDArray[np.int64]
    """Counted from 1."""
    step_s: Floats


class StepPageReader:
    """The page of one process."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.file = os.fstat(file.fileno()).st_ino
            """Which file it is: a process that begins anew makes another."""
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        head = self.read_header()
        if head.magic != MAGIC or len(self._map) < HEAD_BYTES + head.capacity * _RECORD.itemsize:
            raise ValueError(f"{path} is no page of steps")
        self._ring = np.frombuffer(
            self._map, dtype=_RECORD, count=head.capacity, offset=HEAD_BYTES
        )  # fmt: skip

    def read_header(self) -> StepPageHeader:
        """Return what the page says now."""
        return StepPageHeader(*HEAD.unpack_from(self._map))

    def read_last_step_end_ns(self) -> int | None:
        """When the newest step ended; None before the first."""
        head = self.read_header()
        if not head.num_steps:
            return None
        return int(self._ring["ended_ns"][(head.num_steps - 1) % head.capacity])

    def measure_recent_step_s(self, now_ns: int, most: int = 1000) -> float:
        """Return the mean time of the newest steps, up to now.

        A host may send off many steps before it waits for one: only the mean says when others come.
        """
        head = self.read_header()
        count = min(head.num_steps, head.capacity - 2, most)
        began = head.started_ns
        if count < head.num_steps:
            began = int(self._ring["ended_ns"][(head.num_steps - count - 1) % head.capacity])
        return (now_ns - began) / 1e9 / max(count, 1)

    def read_step_durations(self, most: int, since: int = 0) -> StepDurations:
        """Return up to `most` of the newest plain steps after the step `since`.

        The first step has no time, as nothing says when it began; captured ones are left out.
        """
        head = self.read_header()
        # One record of room: the process may be writing the oldest.
        count = min(head.num_steps, head.capacity - 1, most + 1)
        number = np.arange(head.num_steps - count + 1, head.num_steps + 1, dtype=np.int64)
        rows = self._ring[(number - 1) % head.capacity]
        ended = rows["ended_ns"].astype(np.int64)
        took = ended[1:] - ended[:-1] - 1000 * rows["own_us"][:-1].astype(np.int64)
        plain = (rows["mark"][1:] != CAPTURED) & (number[1:] > since)
        return StepDurations(number[1:][plain], took[plain] / 1e9)
