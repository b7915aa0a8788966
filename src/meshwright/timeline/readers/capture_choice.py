"""Tells captures of one rank apart: a profiler that records repeatedly writes a file each time.

`torch.profiler.schedule(..., repeat=3)` with `tensorboard_trace_handler` leaves three files a
rank. They are the same ranks at other times, not other ranks. Whose a file is, its first bytes say
(`distributedInfo`), else its name, else the handler's name for the process that wrote it.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.timeline.readers.trace_formats import read_first_bytes

CAPTURE_NOTE_PREFIX = "capture "
"""How the note begins that says which of several captures a timeline is."""
_SAID = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}\[\]]*?"rank"\s*:\s*"?(\d{1,10})\b')
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})')
_TIME_US = re.compile(rb'"ts"\s*:\s*"?(\d{1,18})')
_RANK = re.compile(r"rank[-_ ]?(\d{1,9})(?!\d)|(?:^|[-_.])r(\d{1,9})(?=[-_.])", re.IGNORECASE)
# What tensorboard_trace_handler makes of a worker's name and the time.
_WORKER = re.compile(r"(.+)\.\d{10,20}\.pt\.trace\.json(?:\.gz)?")


class CaptureChoice(NamedTuple):
    """A file that is read, and what to say of it."""

    path: Path
    note: str
    """Which capture of which rank it is; empty where there is only one."""


def choose_captures(paths: Sequence[Path], number: int | None = None) -> tuple[CaptureChoice, ...]:
    """One file of each rank: its capture of this number, from 1; the last that all ranks have."""
    if len(paths) < 2:
        return tuple(CaptureChoice(path, "") for path in paths)
    captures: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for place, path in enumerate(paths):
        owner, time_ns = _whose(path)
        captures[owner].append((time_ns, place))
    fewest = min(map(len, captures.values()))
    wanted = fewest if number is None else number
    if not 1 <= wanted <= fewest:
        owner = min(captures, key=lambda one: len(captures[one]))
        what = f"{owner} has {fewest} capture{'s' if fewest > 1 else ''}, not {wanted}"
        raise InputError([Problem("--capture", what, f"give 1 to {fewest}")])
    kept: dict[int, str] = {}
    for owner, found in captures.items():
        place = sorted(found)[wanted - 1][1]
        kept[place] = _note(owner, wanted, len(found), paths[place]) if len(found) > 1 else ""
    return tuple(CaptureChoice(paths[place], kept[place]) for place in sorted(kept))


def _note(owner: str, number: int, count: int, path: Path) -> str:
    return (
        f"{CAPTURE_NOTE_PREFIX}{number} of {count} of {owner}, {path.name}: the others were "
        f"left out"
    )


def _whose(path: Path) -> tuple[str, int]:
    """Whose trace a file is, in words, and when its first events were."""
    start = read_first_bytes(path)
    times = [int(match[1]) for match in _TIME_US.finditer(start)]
    base = _BASE.search(start)
    moment_ns = max(times, default=0) * 1000 + (int(base[1]) if base else 0)
    said = _SAID.search(start)
    if said is not None:
        return f"rank {int(said[1])}", moment_ns
    named = _RANK.search(path.name)
    if named is not None:
        return f"rank {int(named[1] or named[2])}", moment_ns
    worker = _WORKER.fullmatch(path.name)
    return (f"worker {worker[1]}" if worker else str(path)), moment_ns
