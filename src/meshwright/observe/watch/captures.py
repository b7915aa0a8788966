"""The captures on disk: what comes in is judged, and only what tells something new is kept.

Kept are the first capture, the newest two without anything unusual (references: the newer may be
from after a slowdown that is not noticed yet), those that differ from what is usual, and those that
a slowdown asked for. The rest is dropped.
"""

import gzip
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from meshwright.errors import MeshwrightError
from meshwright.observe.runs import overview
from meshwright.observe.watch.folder import Folder, remove
from meshwright.observe.watch.makeup import MOST_KNOWN, Grown, Makeup, differs, grown, makeup_of
from meshwright.observe.watch.ring import Held, to_drop
from meshwright.observe.watch.status import CaptureStatus
from meshwright.timeline.readers.traces import read_each

ROUTINE, SLOWDOWN = "routine", "slowdown"
_FIRST, _REFERENCE, _DIFFERS = "first", "reference", "differs"
_REFERENCES = 2
_TOLD = 3
"""Parts of a step that are named as grown."""
_LEAST_TOLD = 0.1
"""Of the growth of the step."""


class Incoming(NamedTuple):
    """The trace of one rank, as its agent wrote it."""

    path: Path
    rank: int


class Wanted(NamedTuple):
    """What was asked for."""

    number: int
    step: int
    num_steps: int
    slow_since: int | None = None
    """The first step of the slowdown that it is taken for; None for a routine one."""


class Judged(NamedTuple):
    """What a capture said."""

    status: CaptureStatus | None
    """None where it was dropped."""
    reference: str
    """The folder of the capture it was held against."""
    what: tuple[str, ...]
    finding: str


class Captures:
    """The captures of one watch."""

    def __init__(self, folder: Folder, keep: int, keep_bytes: int) -> None:
        self._folder, self._keep, self._keep_bytes = folder, keep, keep_bytes
        self._known: list[Makeup] = []
        self._makeups: dict[int, Makeup] = {}
        self._pinned: set[int] = set()
        self.kept: dict[int, CaptureStatus] = {}
        self.num_dropped = 0

    def take(self, wanted: Wanted, files: Sequence[Incoming]) -> Judged:
        """Take in the traces of one capture."""
        name = f"captures/{wanted.number:04d}-step-{wanted.step}"
        home = self._folder.path / name
        try:
            home.mkdir(mode=0o700)
            for file in files:
                _pack(file.path, home / f"rank-{file.rank}.json.gz")
        except OSError as error:  # a full disk
            for path in (home, *(file.path for file in files)):
                remove(path)
            self.num_dropped += 1
            return Judged(None, "", (f"a capture could not be kept: {error.strerror}",), "")
        try:
            makeup = makeup_of(read_each(home))
        except MeshwrightError as error:
            remove(home)
            self.num_dropped += 1
            return Judged(None, "", (f"a capture could not be read: {error}",), "")
        status = CaptureStatus(
            number=wanted.number,
            step=wanted.step,
            steps=wanted.num_steps,
            ranks=len(files),
            why=ROUTINE,
            what="",
            folder=name,
            bytes=sum(path.stat().st_size for path in home.iterdir()),
            step_ms=makeup.step_ns / 1e6,
            on_device=makeup.on_device,
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
        usual = [one for one in self.kept.values() if one.why in {_FIRST, _REFERENCE}]
        return sorted(usual, key=lambda one: one.number)

    def _slowdown(self, status: CaptureStatus, makeup: Makeup, since: int) -> Judged:
        before = [one for one in self._usual() if one.step < since]
        what: tuple[str, ...] = ()
        if before:
            self._pinned.add(before[-1].number)
            usual = self._makeups[before[-1].number]
            least = _LEAST_TOLD * abs(makeup.step_ns - usual.step_ns)
            rows = [row for row in grown(usual, makeup) if row.after_ns - row.before_ns > least]
            what = tuple(said(row) for row in rows[:_TOLD])
        self._pinned.add(status.number)
        kept = replace(status, why=SLOWDOWN, what="; ".join(what))
        self.kept[status.number] = kept
        finding = _finding(self._folder.path / status.folder)
        return Judged(kept, before[-1].folder if before else "", what, finding)

    def _routine(self, status: CaptureStatus, makeup: Makeup) -> Judged:
        change = differs(makeup, self._known)
        self._known = [*self._known, makeup][-MOST_KNOWN:]
        usual = self._usual()
        if not usual:
            self._pinned.add(status.number)
            kept = replace(status, why=_FIRST)
        elif change is not None:
            kept = replace(status, why=_DIFFERS, what=said(change))
        else:
            kept = replace(status, why=_REFERENCE)
            loose = [one for one in usual if one.number not in self._pinned]
            for one in loose[: len(loose) + 1 - _REFERENCES]:
                self._drop(one.number)
        self.kept[status.number] = kept
        what = () if change is None else (said(change),)
        return Judged(kept, usual[-1].folder if usual else "", what, "")

    def _drop_old(self) -> None:
        # What the next one is held against goes last, like the pinned.
        newest = {one.number for one in self._usual()[-1:]}
        held = [
            Held(one.number, one.bytes, one.number in self._pinned | newest)
            for one in self.kept.values()
        ]
        for number in to_drop(held, self._keep, self._keep_bytes):
            self._drop(number)

    def _drop(self, number: int) -> None:
        remove(self._folder.path / self.kept.pop(number).folder)
        self._makeups.pop(number, None)
        self._pinned.discard(number)
        self.num_dropped += 1


def said(row: Grown) -> str:
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
        found = overview(folder).findings or ()
    except MeshwrightError:
        return ""
    if not found:
        return ""
    cost = found[0].cost_ms_per_step
    return found[0].title + (f" ({cost:.2f} ms per step)" if cost is not None else "")
