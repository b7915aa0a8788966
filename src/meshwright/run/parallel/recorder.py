"""`Recorder`: what a rank does and waits for, as spans of the run's `Timeline`, while it happens.

    lane "main"            what the program says it does (`span`), and its waits inside
    lane "exchange tp"     the collectives and messages of a group, from issue to end

Collectives of one group run one after another, so one that was issued early begins, on its lane,
when the one before it ends. Times are the host's: what a GPU does on its own is for the profiler.
"""

import time
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from meshwright.timeline import Kind, TimelineWriter

MAIN = "main"


class _Span:
    """A stretch of the program; made by `Recorder.span`."""

    __slots__ = ("_details", "_kind", "_lane", "_name", "_start_ns", "_writer")

    def __init__(
        self, writer: TimelineWriter, name: str, kind: Kind, lane: str, details: dict[str, int]
    ) -> None:
        self._writer, self._name, self._kind, self._lane = writer, name, kind, lane
        self._details = details

    def __enter__(self) -> None:
        self._start_ns = time.time_ns()

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        start_ns = self._start_ns
        self._writer.span(
            self._name,
            start_ns,
            max(0, time.time_ns() - start_ns),
            kind=self._kind,
            lane=self._lane,
            **self._details,  # type: ignore[arg-type]
        )


class Recorder:
    """Writes one rank's spans into a folder that all ranks share; use it in a `with` block.

    with Recorder(run / "timeline", rank) as recorder:
        mesh.recorder = recorder
        with recorder.span("forward", Kind.COMPUTE, stage=0, microbatch=3):
            ...
    """

    def __init__(self, folder: str | Path, rank: int) -> None:
        self._writer = TimelineWriter(folder, rank=rank)
        self._ends: dict[str, int] = {}
        self._names: dict[tuple[str, str, torch.dtype], tuple[str, str, str, str, str]] = {}

    def span(
        self, name: str, kind: Kind = Kind.COMPUTE, *, lane: str = MAIN, **details: int
    ) -> _Span:
        """Surround a stretch of the program; `details` are stage, microbatch and layer."""
        return _Span(self._writer, name, kind, lane, details)

    def collective(
        self,
        group: str,
        op: str,
        num_bytes: int,
        dtype: torch.dtype,
        *,
        issued_ns: int,
        waits_since_ns: int,
        end_ns: int,
    ) -> None:
        """Write a collective or message: issued, waited for from a time on, and done."""
        names = self._names.get((group, op, dtype))
        if names is None:
            # A message's group is `pp 0>1`: all of a group's lie on one lane each way.
            call, kind = op.partition(" ")[0], str(dtype).removeprefix("torch.")
            names = (f"{op} {group}", f"exchange {group}", call, f"wait for {op} {group}", kind)
            self._names[group, op, dtype] = names
        title, lane, call, wait, kind = names
        # The wall clock may be set back.
        end_ns = max(end_ns, waits_since_ns, issued_ns)
        start_ns = min(max(issued_ns, self._ends.get(lane, 0)), end_ns)
        self._ends[lane] = end_ns
        self._writer.span(
            title,
            start_ns,
            end_ns - start_ns,
            kind=Kind.COMMUNICATION,
            lane=lane,
            bytes=num_bytes,
            collective=call,
            group=group,
            dtype=kind,
        )
        self._writer.span(
            wait,
            waits_since_ns,
            end_ns - waits_since_ns,
            kind=Kind.WAIT,
            lane=MAIN,
            collective=call,
            group=group,
        )

    def flush(self) -> None:
        """Hand what was recorded to the system, where the end of this process cannot reach it."""
        self._writer.flush()

    def close(self) -> None:
        """Complete the file."""
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
