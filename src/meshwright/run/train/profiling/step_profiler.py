"""Chosen steps, recorded kernel by kernel into the run's `Timeline`.

torch's profiler watches the host and the GPU; what it saw becomes spans: one lane per host thread
and per GPU stream, the trainer's own phases around them, and a flow from each launch to its
kernel. Times count from the Unix epoch, as everywhere in a measured timeline. Of several ranks each
records itself.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from meshwright.errors import InputError, Problem
from meshwright.file_errors import make_folder
from meshwright.run.parallel.timeline_recorder import TimelineRecorder
from meshwright.timeline import SpanKind, TimelineWriter

_SPELLING = re.compile(r"(\d+)(?:-(\d+))?")


class ProfiledSteps(NamedTuple):
    """The steps to record, both ends included."""

    first_step: int
    last_step: int

    def __str__(self) -> str:
        return f"{self.first_step}-{self.last_step}"

    @classmethod
    def parse(cls, text: str, where: str = "--profile-steps") -> "ProfiledSteps":
        """Read `10` or `10-12`."""
        match = _SPELLING.fullmatch(text.strip())
        if match is None:
            raise InputError([Problem(where, f"{text!r} names no steps", "write it like 10-12")])
        first = int(match[1])
        last = int(match[2] or first)
        if not 1 <= first <= last:
            what = f"steps {first} to {last} do not follow each other"
            raise InputError([Problem(where, what, f"use {max(1, last)}-{max(1, first)}")])
        return cls(first, last)


class StepProfiler:
    """Records the chosen steps, and writes them when the last one has ended."""

    def __init__(
        self,
        profiled_steps: ProfiledSteps,
        folder: Path,
        *,
        rank: int = 0,
        recorder: TimelineRecorder | None = None,
    ) -> None:
        """What a `recorder` writes of these steps lies beside what torch's profiler sees."""
        self.profiled_steps, self.folder, self.rank, self.recorder = (
            profiled_steps,
            folder,
            rank,
            recorder,
        )
        self.written = False
        self._running: Any = None
        self._opened = ExitStack()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Surround one step of the loop."""
        if (
            self._running is None
            and self.profiled_steps.first_step <= number <= self.profiled_steps.last_step
        ):
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # what was queued before is no part of these steps
            make_folder(self.folder.parent)
            self._timeline = self._opened.enter_context(TimelineWriter(self.folder, rank=self.rank))
            if self.recorder is not None:
                self._opened.enter_context(self.recorder.tee(self._timeline))
            self._running = _profiler()
            self._running.__enter__()
        if self._running is None:
            yield
            return
        with torch.profiler.record_function(f"step {number}"):
            yield
        if number >= self.profiled_steps.last_step:
            self.close()

    def close(self) -> None:
        """Write what was recorded so far."""
        running, self._running = self._running, None
        if running is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        with self._opened:
            running.__exit__(None, None, None)
            _write(running.profiler.kineto_results.events(), self._timeline)
        self.written = True


def _profiler() -> Any:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities, acc_events=True)


def _write(events: Any, timeline: TimelineWriter) -> None:
    """Turn the profiler's events into spans."""
    found = [event for event in events if event.duration_ns() >= 0]
    on_device = [event for event in found if _is_device(event) and not event.is_user_annotation()]
    launched = {event.correlation_id() for event in on_device}
    started: set[int] = set()
    host_kind = SpanKind.HOST if on_device else SpanKind.COMPUTE
    for event in found:
        name, start_ns, duration_ns = event.name(), event.start_ns(), event.duration_ns()
        flow = event.correlation_id() or None
        if _is_device(event):
            if event.is_user_annotation():
                continue  # the host's phase again, stretched over its kernels
            timeline.span(
                name,
                start_ns,
                duration_ns,
                kind=_kind(name),
                process=f"gpu {event.device_index()}",
                lane=f"stream {event.device_resource_id()}",
                flow_in=flow,
            )
            continue
        # torch numbers its operators too, from another range than launches: one span may start it.
        starts = flow in launched and flow not in started and name.startswith("cu")
        if starts and flow is not None:
            started.add(flow)
        timeline.span(
            name,
            start_ns,
            duration_ns,
            kind=SpanKind.HOST if event.is_user_annotation() else host_kind,
            process="host",
            lane=f"thread {event.device_resource_id()}",
            flow_out=flow if starts else None,
        )


def _is_device(event: Any) -> bool:
    return not str(event.device_type()).endswith("CPU")


def _kind(name: str) -> SpanKind:
    lowered = name.lower()
    if "nccl" in lowered:
        return SpanKind.COMMUNICATION
    if lowered.startswith(("memcpy", "memset")):
        return SpanKind.MEMORY_COPY
    return SpanKind.COMPUTE
