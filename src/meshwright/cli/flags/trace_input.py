"""Files that break off: what they hold up to there, and what to say of it."""

import argparse
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.observe.analyze.spans.device_split import split_by_device
from meshwright.timeline.readers.trace_cache import TraceCache, open_default_cache
from meshwright.timeline.readers.trace_folder import find_empty_traces, iter_timelines
from meshwright.timeline.timeline import Timeline

Part = TypeVar("Part")


def read_undamaged(
    files: Iterable[Path], read: Callable[[Path], Part], kind: type[Part]
) -> tuple[list[Part], list[str]]:
    """Read every file; of one that breaks off, what was kept, and a line on what is wrong."""
    found, damaged = list[Part](), list[str]()
    for file in files:
        try:
            found.append(read(file))
        except DamagedFile as damage:
            if not isinstance(damage.readable, kind):
                raise
            found.append(damage.readable)
            damaged += [f"{one.where}: {one.what}; {one.fix}" for one in damage.problems]
    return found, damaged


def open_cache(args: argparse.Namespace) -> TraceCache | None:
    """The cache that a command reads through."""
    return None if args.no_cache else open_default_cache()


def read_num_workers(args: argparse.Namespace) -> int:
    """How many processes read."""
    if not re.fullmatch(r"[1-9]\d{0,3}", args.num_workers):
        fix = "give a whole number from 1, such as the cores of this machine"
        raise InputError(
            [Problem("--num-workers", f"{args.num_workers!r} is no number of processes", fix)]
        )
    return int(args.num_workers)


def read_capture(args: argparse.Namespace) -> int | None:
    """Which capture of each rank is looked at; None for the last that all have."""
    if args.capture is None:
        return None
    if not re.fullmatch(r"[1-9]\d{0,5}", args.capture):
        fix = "give a whole number: 1 for the first that was recorded"
        raise InputError([Problem("--capture", f"{args.capture!r} is no number", fix)])
    return int(args.capture)


def parse_number_list(flag: str, text: str | None) -> frozenset[int]:
    """The numbers of a list such as `0-3,7`; none where nothing was given."""
    found: set[int] = set()
    for piece in (text or "").split(",") if text is not None else ():
        ends = re.fullmatch(r"\s*(\d{1,9})(?:\s*-\s*(\d{1,9}))?\s*", piece)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (1, 0)
        if last < first or last - first > 1_000_000:
            fix = "give numbers and ranges, such as 3 or 0-3,7"
            raise InputError([Problem(flag, f"{text!r} is no list of numbers", fix)])
        found |= set(range(first, last + 1))
    return frozenset(found)


class TraceRanks:
    """A path that is read rank by rank; a device that shares its process is a rank of its own."""

    def __init__(self, path: str, args: argparse.Namespace, *, detail: str = "standard") -> None:
        """Nothing is read before it is iterated over."""
        self.path, self._args, self._detail = path, args, detail
        self._wanted = parse_number_list("--ranks", args.ranks)
        self._others: set[int] = set()
        self._breaks_off = False
        self.count = 0
        """How many ranks came so far."""
        self.damaged: list[str] = []
        """What broke off or is empty, in words."""

    def __iter__(self) -> Iterator[Timeline]:
        self.damaged += find_empty_traces(self.path)
        num_workers, cache = read_num_workers(self._args), open_cache(self._args)
        try:
            for whole in iter_timelines(
                self.path, num_workers=num_workers, detail=self._detail, cache=cache
            ):
                for part in split_by_device(whole):
                    if not self._wanted or self._wanted & set(part.ranks):
                        self.count += 1
                        yield part
                    else:
                        self._others.update(part.ranks)
        except DamagedFile as damage:
            self._breaks_off = True
            self.damaged.extend(str(problem) for problem in damage.problems)

    def no_ranks_error(self) -> InputError:
        """What to say where no rank came."""
        if self._others:
            known = ", ".join(map(str, sorted(self._others)))
            what, fix = "has none of these ranks", f"name some of {known}"
        else:
            what, fix = "holds no spans", "record some steps with the profiler on"
        return InputError([Problem(self.path, what, fix)])

    def no_device_work_error(self) -> InputError:
        """What to say where nothing ran on a device."""
        if self._breaks_off:
            what = "breaks off before the first kernel"
            return InputError([Problem(self.path, what, "copy it again, or record it again")])
        fix = "record with ProfilerActivity.CUDA"
        return InputError([Problem(self.path, "has no device work", fix)])
