"""Reads a CUDA memory snapshot (`torch.cuda.memory._dump_snapshot`, a pickle) into columns.

A snapshot holds what the caching allocator has now (segments, cut into blocks) and, where recording
was on, what it did before (a ring of events per device). Stacks are kept once each. Fields that
older versions lack (times, annotations, settings, frames of blocks) are read as absent. No torch.

Format: torch/csrc/cuda/memory_snapshot.cpp of PyTorch. The pickle comes from strangers and is read
by `safe_pickle`; rows that the file shares are counted, so that none unfolds without bound.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError, Problem
from meshwright.timeline.readers.flight_recorder.flight_recorder_reader import StackFrame
from meshwright.timeline.readers.safe_pickle.safe_pickle import (
    parse_pickle,
    pause_gc,
    read_bounded_file,
)

Numbers = NDArray[np.int64]

ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map",
    "segment_unmap", "snapshot", "oom",
)  # fmt: skip
ALLOC, FREE_REQUESTED, FREE_COMPLETED = 0, 1, 2
SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP = 3, 4, 5, 6
OOM = ACTIONS.index("oom")
UNKNOWN_ACTION = len(ACTIONS)
"""Code of an action that this reader does not know."""
STATES = ("active_allocated", "active_awaiting_free", "inactive", "active_pending_free")
INACTIVE = STATES.index("inactive")


class SnapshotSegments(NamedTuple):
    """What was asked of the driver: one row for each."""

    device: Numbers
    address: Numbers
    total_bytes: Numbers
    allocated_bytes: Numbers
    active_bytes: Numbers
    requested_bytes: Numbers
    stream: Numbers
    is_expandable: Numbers
    stack: Numbers
    is_private: Numbers
    """Whether it belongs to a pool of its own: to CUDA graphs, or to a `torch.cuda.MemPool`."""


class SnapshotBlocks(NamedTuple):
    """The pieces of segments, in use or not."""

    segment: Numbers
    address: Numbers
    size_bytes: Numbers
    requested_bytes: Numbers
    state: Numbers
    """Index into `STATES`."""
    stack: Numbers


class AllocatorEvents(NamedTuple):
    """What the allocator did, in order, device by device."""

    device: Numbers
    action: Numbers
    """Index into `ACTIONS`, or `UNKNOWN_ACTION`."""
    address: Numbers
    """Of an `oom`: the bytes that the device had free."""
    size_bytes: Numbers
    stream: Numbers
    time_us: Numbers
    """-1 where the version does not tell."""
    stack: Numbers


class SnapshotAnnotation(NamedTuple):
    """A named stretch, opened or closed."""

    name: str
    is_start: bool
    device: int
    time_us: int


class MemorySnapshot(NamedTuple):
    """A whole snapshot."""

    path: str
    segments: SnapshotSegments
    blocks: SnapshotBlocks
    events: AllocatorEvents
    frames: tuple[StackFrame, ...]
    stacks: tuple[tuple[int, ...], ...]
    """Each stack as indices into `frames`, innermost first; the first one is the empty stack."""
    annotations: tuple[SnapshotAnnotation, ...]
    allocator_settings: Mapping[str, Any]

    def get_stack(self, index: int) -> tuple[StackFrame, ...]:
        """Return the frames of one stack, innermost first."""
        return tuple(self.frames[frame] for frame in self.stacks[index])


def read_memory_snapshot(path: str | Path) -> MemorySnapshot:
    """Read one snapshot, plain or compressed by gzip."""
    path = Path(path)
    raw = read_bounded_file(path)
    with pause_gc():
        return parse_snapshot(parse_pickle(raw, str(path)), str(path), len(raw))


def parse_snapshot(data: Any, where: str, num_bytes: int) -> MemorySnapshot:
    """Turn a snapshot's plain data into columns."""
    if isinstance(data, list):  # `torch.cuda.memory_snapshot()` alone: segments without events
        data = {"segments": data}
    if not isinstance(data, dict) or not isinstance(data.get("segments"), list | tuple):
        what = "not a memory snapshot: it has no list of segments"
        fix = "name a file that torch.cuda.memory._dump_snapshot wrote"
        raise InputError([Problem(where, what, fix)])
    reading = _Reading(where, num_bytes)
    segments, blocks = _segments(reading, data["segments"])
    events = _events(reading, data.get("device_traces"))
    annotations = _annotations(reading, data.get("external_annotations"))
    settings = data.get("allocator_settings")
    plain = {
        str(key)[:80]: value
        for key, value in (settings.items() if isinstance(settings, dict) else ())
        if isinstance(value, str | int | float | bool)
    }
    frames, stacks = reading.stacks.frames(), reading.stacks.stacks()
    return MemorySnapshot(where, segments, blocks, events, frames, stacks, annotations, plain)


_BYTES_PER_ROW = 16
"""Real events take 60 and more; lines of a stack are only pointed at, with 2 to 5."""


class _Reading:
    """What is kept while reading: the stacks, and how much the file may still unfold to."""

    def __init__(self, where: str, num_bytes: int) -> None:
        self.where = where
        self.left = num_bytes + 1024 * _BYTES_PER_ROW
        self.stacks = _Stacks(self)

    def rows(self, value: Any, each_bytes: int = _BYTES_PER_ROW) -> Sequence[Any]:
        """Return a list's items; a file whose lists unfold to more than its bytes is refused."""
        if not isinstance(value, list | tuple):
            return ()
        self.left -= each_bytes * len(value)
        if self.left < 0:
            what = "unfolds to more rows than its bytes can mean"
            raise InputError([Problem(self.where, what, "write the snapshot again")])
        return value


class _Stacks:
    """Stacks and frames, each kept once; lists that the file shares are looked at once."""

    def __init__(self, reading: _Reading) -> None:
        self._reading = reading
        self._stacks: dict[tuple[int, ...], int] = {(): 0}
        self._frames: dict[StackFrame, int] = {}
        self._stack_of: dict[int, int] = {}
        self._frame_of: dict[int, int] = {}

    def number(self, frames: Any) -> int:
        """Return the number of a stack; 0 for none."""
        if not frames or not isinstance(frames, list | tuple):
            return 0
        known = self._stack_of.get(id(frames))
        if known is None:
            stack = tuple([self._frame(frame) for frame in self._reading.rows(frames, 1)])
            known = self._stacks.setdefault(stack, len(self._stacks))
            self._stack_of[id(frames)] = known
        return known

    def _frame(self, frame: Any) -> int:
        known = self._frame_of.get(id(frame))
        if known is None:
            fields = frame if isinstance(frame, dict) else {}
            made = StackFrame(
                _text(fields.get("name")), _text(fields.get("filename")), _whole(fields.get("line"))
            )
            known = self._frames.setdefault(made, len(self._frames))
            self._frame_of[id(frame)] = known
        return known

    def frames(self) -> tuple[StackFrame, ...]:
        """Return all frames in the order of their numbers."""
        return tuple(self._frames)

    def stacks(self) -> tuple[tuple[int, ...], ...]:
        """Return all stacks in the order of their numbers."""
        return tuple(self._stacks)


def _whole(value: Any, default: int = 0) -> int:
    if type(value) is int and -(1 << 62) < value < 1 << 62:
        return value
    return int(value) if isinstance(value, bool) else default


def _address(value: Any) -> int:
    """Addresses may use the top bit; only their equality and order matter here."""
    return value & ((1 << 62) - 1) if type(value) is int else 0


def _text(value: Any) -> str:
    return value[:4096] if isinstance(value, str) else ""


def _segments(reading: _Reading, rows: Any) -> tuple[SnapshotSegments, SnapshotBlocks]:
    segments: list[tuple[int, ...]] = []
    blocks: list[tuple[int, ...]] = []
    for row in reading.rows(rows):
        if not isinstance(row, dict):
            continue
        address = _address(row.get("address"))
        number = len(segments)
        segments.append(
            (
                _whole(row.get("device")), address, _whole(row.get("total_size")),
                _whole(row.get("allocated_size")), _whole(row.get("active_size")),
                _whole(row.get("requested_size")), _whole(row.get("stream")),
                _whole(row.get("is_expandable")), reading.stacks.number(row.get("frames")),
                _is_private(row.get("segment_pool_id")),
            )
        )  # fmt: skip
        for block in reading.rows(row.get("blocks")):
            if isinstance(block, dict):
                size = _whole(block.get("size"))
                # Versions before 2.1 tell no addresses: blocks lie side by side.
                at = _address(block["address"]) if "address" in block else address
                state = block.get("state")
                blocks.append(
                    (
                        number, at, size, _whole(block.get("requested_size"), size),
                        STATES.index(state) if state in STATES else INACTIVE,
                        reading.stacks.number(block.get("frames") or _history(block)),
                    )
                )  # fmt: skip
                address = at + size
    return SnapshotSegments(*_columns(segments, 10)), SnapshotBlocks(*_columns(blocks, 6))


def _is_private(pool: Any) -> int:
    return int(isinstance(pool, list | tuple) and any(type(part) is int and part for part in pool))


def _history(block: Mapping[Any, Any]) -> Any:
    """Return the stack of a block as versions of 2022 and 2023 kept it."""
    history = block.get("history")
    if isinstance(history, list) and history and isinstance(history[0], dict):
        return history[0].get("frames")
    return None


_ACTION_CODES = {name: code for code, name in enumerate(ACTIONS)}


def _events(reading: _Reading, traces: Any) -> AllocatorEvents:
    events: list[tuple[int, ...]] = []
    number = reading.stacks.number
    for device, trace in enumerate(reading.rows(traces)):
        for row in reading.rows(trace):
            if isinstance(row, dict):
                action = row.get("action")
                code = (
                    _ACTION_CODES.get(action, UNKNOWN_ACTION)
                    if isinstance(action, str)
                    else UNKNOWN_ACTION
                )
                address = row.get("addr", row.get("device_free"))
                events.append(
                    (
                        device, code, _address(address), _whole(row.get("size")),
                        _whole(row.get("stream")), _whole(row.get("time_us"), -1),
                        number(row.get("frames")),
                    )
                )  # fmt: skip
    return AllocatorEvents(*_columns(events, 7))


def _annotations(reading: _Reading, rows: Any) -> tuple[SnapshotAnnotation, ...]:
    return tuple(
        SnapshotAnnotation(
            _text(row.get("name")),
            row.get("stage") == "START",
            _whole(row.get("device")),
            _whole(row.get("time_us"), -1),
        )
        for row in reading.rows(rows)
        if isinstance(row, dict)
    )


def _columns(rows: list[tuple[int, ...]], width: int) -> list[Numbers]:
    whole = np.array(rows, np.int64).reshape(-1, width)
    return [np.ascontiguousarray(whole[:, column]) for column in range(width)]
