"""The captures on disk: what comes in is judged, and only what tells something new is kept.

Kept are the first capture, the newest two without anything unusual (references: the newer may be
from after a slowdown that is not noticed yet), those that differ from what is usual, and those that
a slowdown asked for. The rest is dropped.
"""

import gzip
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from meshwright.errors import MeshwrightError
from meshwright.observe.overview import analyze_run
from meshwright.observe.watch.step_signature import (
    MAX_KNOWN_CAPTURES,
    SignatureChange,
    StepSignature,
    build_signature,
    find_growth,
    find_unusual_change,
)
from meshwright.observe.watch.watch_folder import WatchFolder, remove_path
from meshwright.observe.watch.watch_status import CaptureStatus
from meshwright.timeline.readers.trace_folder import iter_timelines


class StoredCapture(NamedTuple):
    """A capture on disk."""

    number: int
    """In the order of time."""
    num_bytes: int
    is_pinned: bool
    """Something refers to it: it goes last."""


def select_evictions(held: Iterable[StoredCapture], most: int, most_bytes: int) -> tuple[int, ...]:
    """Return the numbers that go: the oldest first, pinned ones last, the newest of all never."""
    left = sorted(held)
    if not left:
        return ()
    *older, _ = left
    count, size = len(left), sum(one.num_bytes for one in left)
    gone = []
    for one in [one for one in older if not one.is_pinned] + [
        one for one in older if one.is_pinned
    ]:
        if count <= most and size <= most_bytes:
            break
        gone.append(one.number)
        count, size = count - 1, size - one.num_bytes
    return tuple(gone)


ROUTINE, SLOWDOWN = "routine", "slowdown"

_FIRST, _REFERENCE, _CHANGED = "first", "reference", "changed"

_REFERENCES = 2

_TOLD = 3
"""Parts of a step that are named as grown."""

_LEAST_TOLD = 0.1
"""Of the growth of the step."""


class IncomingTrace(NamedTuple):
    """The trace of one rank, as its agent wrote it."""

    path: Path
    rank: int


class CaptureRequest(NamedTuple):
    """What was asked for."""

    number: int
    step: int
    num_steps: int
    slow_since: int | None = None
    """The first step of the slowdown that it is taken for; None for a routine one."""


class CaptureAssessment(NamedTuple):
    """What a capture said."""

    status: CaptureStatus | None
    """None where it was dropped."""
    reference: str
    """The folder of the capture it was held against."""
    changes: tuple[str, ...]
    finding: str


class CaptureStore:
    """The captures of one watch."""

    def __init__(self, folder: WatchFolder, keep: int, keep_bytes: int) -> None:
        self._folder, self._keep, self._keep_bytes = folder, keep, keep_bytes
        self._known: list[StepSignature] = []
        self._makeups: dict[int, StepSignature] = {}
        self._pinned: set[int] = set()
        self.captures: dict[int, CaptureStatus] = {}
        self.num_dropped = 0

    def add(self, wanted: CaptureRequest, files: Sequence[IncomingTrace]) -> CaptureAssessment:
        """Take in the traces of one capture."""
        name = f"captures/{wanted.number:04d}-step-{wanted.step}"
        home = self._folder.path / name
        try:
            home.mkdir(mode=0o700)
            for file in files:
                _pack(file.path, home / f"rank-{file.rank}.json.gz")
        except OSError as error:  # a full disk
            for path in (home, *(file.path for file in files)):
                remove_path(path)
            self.num_dropped += 1
            return CaptureAssessment(
                None, "", (f"a capture could not be kept: {error.strerror}",), ""
            )
        try:
            makeup = build_signature(iter_timelines(home))
        except MeshwrightError as error:
            remove_path(home)
            self.num_dropped += 1
            return CaptureAssessment(None, "", (f"cannot read a capture: {error}",), "")
        status = CaptureStatus(
            number=wanted.number,
            step=wanted.step,
            steps=wanted.num_steps,
            ranks=len(files),
            reason=ROUTINE,
            differences="",
            folder=name,
            bytes=sum(path.stat().st_size for path in home.iterdir()),
            step_ms=makeup.step_ns / 1e6,
            has_device_work=makeup.has_device_work,
        )
        self._makeups[wanted.number] = makeup
        if wanted.slow_since is not None:
            judged = self._slowdown(status, makeup, wanted.slow_since)
        else:
            judged = self._routine(status, makeup)
        self._drop_old()
        return judged

    def _usual(self) -> list[CaptureStatus]:
        """Captures without anything unusual, the newest last."""
        usual = [one for one in self.captures.values() if one.reason in {_FIRST, _REFERENCE}]
        return sorted(usual, key=lambda one: one.number)

    def _slowdown(
        self, status: CaptureStatus, makeup: StepSignature, since: int
    ) -> CaptureAssessment:
        before = [one for one in self._usual() if one.step < since]
        what: tuple[str, ...] = ()
        if before:
            self._pinned.add(before[-1].number)
            usual = self._makeups[before[-1].number]
            least = _LEAST_TOLD * abs(makeup.step_ns - usual.step_ns)
            rows = [
                row for row in find_growth(usual, makeup) if row.after_ns - row.before_ns > least
            ]
            what = tuple(format_change(row) for row in rows[:_TOLD])
        self._pinned.add(status.number)
        kept = replace(status, reason=SLOWDOWN, differences="; ".join(what))
        self.captures[status.number] = kept
        finding = _finding(self._folder.path / status.folder)
        return CaptureAssessment(kept, before[-1].folder if before else "", what, finding)

    def _routine(self, status: CaptureStatus, makeup: StepSignature) -> CaptureAssessment:
        change = find_unusual_change(makeup, self._known)
        self._known = [*self._known, makeup][-MAX_KNOWN_CAPTURES:]
        usual = self._usual()
        if not usual:
            self._pinned.add(status.number)
            kept = replace(status, reason=_FIRST)
        elif change is not None:
            kept = replace(status, reason=_CHANGED, differences=format_change(change))
        else:
            kept = replace(status, reason=_REFERENCE)
            loose = [one for one in usual if one.number not in self._pinned]
            for one in loose[: len(loose) + 1 - _REFERENCES]:
                self._drop(one.number)
        self.captures[status.number] = kept
        what = () if change is None else (format_change(change),)
        return CaptureAssessment(kept, usual[-1].folder if usual else "", what, "")

    def _drop_old(self) -> None:
        # What the next one is held against goes last, like the pinned.
        newest = {one.number for one in self._usual()[-1:]}
        held = [
            StoredCapture(one.number, one.bytes, one.number in self._pinned | newest)
            for one in self.captures.values()
        ]
        for number in select_evictions(held, self._keep, self._keep_bytes):
            self._drop(number)

    def _drop(self, number: int) -> None:
        remove_path(self._folder.path / self.captures.pop(number).folder)
        self._makeups.pop(number, None)
        self._pinned.discard(number)
        self.num_dropped += 1


def format_change(row: SignatureChange) -> str:
    """One part of a step that changed, in words."""
    return f"{row.name} {row.before_ns / 1e6:.2f} → {row.after_ns / 1e6:.2f} ms"


def _pack(source: Path, target: Path) -> None:
    target.touch(mode=0o600)
    with source.open("rb") as plain, gzip.open(target, "wb", compresslevel=1) as packed:
        shutil.copyfileobj(plain, packed, 1 << 20)
    source.unlink()


def _finding(folder: Path) -> str:
    """The costliest finding of a capture, in words; empty where there is none."""
    try:
        found = analyze_run(folder).findings or ()
    except MeshwrightError:
        return ""
    if not found:
        return ""
    cost = found[0].cost_ms_per_step
    return found[0].title + (f" ({cost:.2f} ms per step)" if cost is not None else "")
