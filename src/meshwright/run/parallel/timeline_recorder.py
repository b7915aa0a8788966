"""`TimelineRecorder`: records work and waits of a rank as spans of the run's `Timeline`.

    lane "forward-backward"  forward and backward passes, called as a simulated step calls them
    lane "host"              what the program says it does (`span`, `record_step`), and its waits
    lane "comm tp"           the collectives and messages of a group, from issue to end

All of them lie on the process "host", as times are the host's: what a GPU does on its own is for
the profiler. Collectives of one group run one after another, so one that was issued early begins,
on its lane, when the one before it ends.

A run may last for months. Where `keep_steps` is given, a file with so many steps is moved to the
folder `previous` within the timeline's, in place of the one that was there.
"""

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from meshwright.errors import InputError
from meshwright.file_errors import convert_os_errors, make_folder
from meshwright.policy.pipeline.pass_spans import LANE, PASS_NAMES, PROCESS, encode_span_details
from meshwright.spec.layout import ModelChunk
from meshwright.timeline import SpanKind

if TYPE_CHECKING:
    from meshwright.timeline import TimelineWriter

HOST_LANE = "host"
PREVIOUS_FOLDER = "previous"
"""Folder of the steps before those in the timeline's own."""
FLUSH_NS = 10_000_000_000
"""Spans of so long may be lost by a kill. A flush takes 4 to 14 ms on a core of an AMD EPYC."""


class _Span:
    """A stretch of the program; made by `TimelineRecorder.span`."""

    __slots__ = ("_details", "_kind", "_lane", "_name", "_recorder", "_start_ns")

    def __init__(
        self,
        recorder: "TimelineRecorder",
        name: str,
        kind: SpanKind,
        lane: str,
        details: dict[str, int],
    ) -> None:
        self._recorder, self._name, self._kind, self._lane = recorder, name, kind, lane
        self._details = details

    def __enter__(self) -> None:
        self._start_ns = time.time_ns()

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self._recorder.record_span(
            self._name, self._start_ns, self._kind, self._lane, **self._details
        )


class TimelineRecorder:
    """Writes one rank's spans into a folder that all ranks share; use it in a `with` block.

    with TimelineRecorder(run / "timeline", rank) as recorder:
        mesh.recorder = recorder
        with recorder.span("forward", SpanKind.COMPUTE, stage=0, microbatch=3):
            ...

    A disk that fails is warned of once, and nothing more is recorded: it is no reason to end a run.
    """

    def __init__(
        self,
        folder: str | Path,
        rank: int,
        *,
        metadata: Mapping[str, str] | None = None,
        keep_steps: int | None = None,
        steps: int = 0,
    ) -> None:
        """Open the rank's file, or go on with it; it holds so many `steps` already.

        Without `keep_steps` it grows as long as the run lasts.
        """
        self.folder, self.rank = Path(folder), rank
        self.comm_wait_s = 0.0
        """How long the program was blocked in collectives and messages, in all."""
        self._metadata, self._keep_steps, self._steps = metadata, keep_steps, steps
        self._ends: dict[str, int] = {}
        self._names: dict[tuple[str, str, torch.dtype], tuple[str, str, str, str, str]] = {}
        self._chunks: dict[int, str] = {}
        self._flushed = time.time_ns() // FLUSH_NS
        self._writer = self._open()
        self._put: Callable[..., None] = self._writer.span

    def _open(self) -> "TimelineWriter":
        from meshwright.timeline import TimelineWriter  # Arrow is for those who record

        return TimelineWriter(self.folder, rank=self.rank, metadata=self._metadata)

    def span(
        self, name: str, kind: SpanKind = SpanKind.COMPUTE, *, lane: str = HOST_LANE, **details: int
    ) -> _Span:
        """Surround a stretch of the program; `details` are stage, microbatch and layer."""
        return _Span(self, name, kind, lane, details)

    def record_span(
        self, name: str, start_ns: int, kind: SpanKind, lane: str, **details: int
    ) -> None:
        """Write a stretch of the program that ends now."""
        length_ns = max(0, time.time_ns() - start_ns)
        try:
            self._put(name, start_ns, length_ns, kind=kind, lane=lane, process=PROCESS, **details)
        except InputError as error:
            self._give_up(error)

    def record_pass(self, op: str, chunk: ModelChunk, microbatch: int, seconds: float) -> None:
        """Write a pass of a microbatch through a chunk that ends now and took so long."""
        extra = self._chunks.get(chunk.position)
        if extra is None:
            extra = self._chunks[chunk.position] = encode_span_details(chunk)
        length_ns = int(seconds * 1e9)
        try:
            self._put(
                PASS_NAMES[op],
                time.time_ns() - length_ns,
                length_ns,
                kind=SpanKind.HOST,
                lane=LANE,
                process=PROCESS,
                stage=chunk.rank,
                microbatch=microbatch,
                layer=chunk.first,
                extra=extra,
            )
        except InputError as error:
            self._give_up(error)

    def record_collective(
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
            names = (f"{op} {group}", f"comm {group}", call, f"wait for {op} {group}", kind)
            self._names[group, op, dtype] = names
        title, lane, call, wait, kind = names
        # The wall clock may be set back.
        end_ns = max(end_ns, waits_since_ns, issued_ns)
        start_ns = min(max(issued_ns, self._ends.get(lane, 0)), end_ns)
        self._ends[lane] = end_ns
        self.comm_wait_s += (end_ns - waits_since_ns) / 1e9
        try:
            self._put(
                title,
                start_ns,
                end_ns - start_ns,
                kind=SpanKind.COMMUNICATION,
                lane=lane,
                process=PROCESS,
                bytes=num_bytes,
                collective=call,
                group=group,
                dtype=kind,
            )
            self._put(
                wait,
                waits_since_ns,
                end_ns - waits_since_ns,
                kind=SpanKind.WAIT,
                lane=HOST_LANE,
                process=PROCESS,
                collective=call,
                group=group,
            )
        except InputError as error:
            self._give_up(error)

    def record_step(self, name: str, start_ns: int) -> None:
        """Write a step that ends now; from time to time all so far goes to the file."""
        self.record_span(name, start_ns, SpanKind.HOST, HOST_LANE)
        self._steps += 1
        # By the clock of the day: ranks end a step together, so none waits for others' flushes.
        now = time.time_ns() // FLUSH_NS
        try:
            if self._keep_steps is not None and self._steps >= self._keep_steps:
                self._turn_over()
            elif now != self._flushed:
                self.flush()
            self._flushed = now
        except InputError as error:
            self._give_up(error)

    def _turn_over(self) -> None:
        """Move the file to those before, and begin another."""
        from meshwright.timeline.store.timeline_folder import locate_rank_files

        if self._put is _nowhere:
            return
        self._writer.close()
        file, before = (
            locate_rank_files(self.folder, self.rank).spans,
            self.folder / PREVIOUS_FOLDER,
        )
        make_folder(before)
        with convert_os_errors(file, "move"):
            file.replace(before / file.name)
        old, self._writer, self._steps = self._writer.span, self._open(), 0
        if self._put == old:
            self._put = self._writer.span

    @contextmanager
    def tee(self, other: "TimelineWriter") -> Iterator[None]:
        """Write everything into another timeline as well."""

        def both(*args: Any, **details: Any) -> None:
            other.span(*args, **details)
            self._writer.span(*args, **details)

        if self._put is _nowhere:
            yield
            return
        self._put = both
        try:
            yield
        finally:
            if self._put is both:
                self._put = self._writer.span

    def _give_up(self, error: InputError) -> None:
        if self._put is _nowhere:
            return
        self._put = _nowhere
        what = f"the timeline of rank {self.rank} failed and is left out from now on"
        warnings.warn(f"{what}: {error}", stacklevel=3)

    def flush(self) -> None:
        """Hand what was recorded to the system, where the end of this process cannot reach it."""
        if self._put is not _nowhere:
            self._writer.flush()

    def close(self) -> None:
        """Complete the file; what comes after is not recorded."""
        self._put = _nowhere
        self._writer.close()

    def close_within(self, seconds: float) -> None:
        """Complete the file unless the disk does not answer; for a process that has to end."""

        def attempt() -> None:
            with suppress(Exception):  # there is nobody left to care
                self.close()

        closing = threading.Thread(target=attempt, daemon=True)
        closing.start()
        closing.join(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        except InputError as error:
            warnings.warn(f"the timeline of rank {self.rank} was not closed: {error}", stacklevel=2)


def _nowhere(*_: object, **__: object) -> None:
    """Take a span and forget it."""


_NOTHING = nullcontext()


def record_span_if_enabled(
    recorder: TimelineRecorder | None, name: str
) -> "_Span | nullcontext[None]":
    """Surround what the host does in a step, where somebody records it."""
    return _NOTHING if recorder is None else recorder.span(name, SpanKind.HOST)
