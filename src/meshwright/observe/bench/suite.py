"""The bench: families in turn, within a budget, every row kept as soon as it is there.

Rows go to a file of JSON lines. A bench that is started again reads it first and goes on with what
is missing, as long as the machine is the same.
"""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.observe.bench.case import Case, Machine, Row
from meshwright.observe.bench.family import Family, Fault, Place, Size, row_of
from meshwright.observe.bench.telemetry import Sampler
from meshwright.observe.bench.timing import GpuTimer, HostTimer

BUDGET_S: dict[Size, float] = {"quick": 54.0, "full": 345.0}
"""A minute and six, less what it takes to load torch and to end the last case."""


class Bench(NamedTuple):
    """What a file of rows holds."""

    machine: Machine
    rows: tuple[Row, ...]
    failed: tuple[tuple[str, str], ...] = ()
    """Cases that broke, by key, with what they said."""
    unable: tuple[str, ...] = ()
    """Those that this machine cannot do."""
    late: tuple[str, ...] = ()
    """Those that there was no time for."""


class Progress(NamedTuple):
    """How far a bench has come."""

    family: Family
    done: int
    of: int
    row: Row | None


def measure(
    families: Sequence[Family],
    place: Place,
    machine: Machine,
    *,
    size: Size = "full",
    path: Path | None = None,
    budget_s: float | None = None,
    say: Callable[[Progress], None] = lambda _: None,
) -> Bench:
    """Measure what is not in the file yet, until all is there or the time is up.

    Families share what is left of the budget as they usually do, so that a slow one cannot use up
    the others' time, and what a quick one leaves is theirs. What the last one leaves goes to those
    that have not come to their end.
    """
    known = dict[str, Row]()
    if path is not None and path.exists():
        known = {row.case.key: row for row in read(path, machine).rows}
        _mend(path)
    end = time.monotonic() + (BUDGET_S[size] if budget_s is None else budget_s)
    if path is not None and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        _append(path, machine)
    rows, failed, unable = list(known.values()), list[Fault](), list[str]()
    asked = {family.name: family.cases(size, place.on_gpu) for family in families}
    tried = set(known)

    def left(family: Family) -> list[Case]:
        return [case for case in asked[family.name] if case.key not in tried]

    def go_through(some: Sequence[Family]) -> None:
        for number, family in enumerate(some):
            share = family.usual_s[size] / sum(one.usual_s[size] for one in some[number:])
            until = time.monotonic() + (end - time.monotonic()) * share
            for found in _family(family, left(family), place, until):
                match found:
                    case Row():
                        tried.add(found.case.key)
                        rows.append(found)
                        if path is not None:
                            _append(path, found)
                        done = sum(row.case.family == family.name for row in rows)
                        say(Progress(family, done, len(asked[family.name]), found))
                    case Case():
                        tried.add(found.key)
                        unable.append(found.key)
                    case (key, _):
                        tried.add(key)
                        failed.append(found)

    go_through(families)
    # Ranks that sweep together would not know of each other's second round.
    go_through([family for family in families if family.sweep is None and left(family)])
    late = tuple(case.key for family in families for case in left(family))
    return Bench(machine, tuple(rows), tuple(failed), tuple(unable), late)


def _family(
    family: Family, cases: Sequence[Case], place: Place, end: float
) -> Iterator[Row | Case | Fault]:
    """Measure cases until time is up; one that cannot be done here comes back as it is."""
    if family.sweep is not None:
        yield from _swept(family, cases, place, end)
        return
    if not cases or time.monotonic() > end:
        return
    timer: GpuTimer | HostTimer = HostTimer()
    if place.on_gpu and family.on_device:
        timer = GpuTimer(place.device, loaded=family.loaded, heat_s=family.heat_s)
    for case in cases:
        if time.monotonic() > end:
            return
        try:
            yield _row(family, case, place, timer) or case
        except (RuntimeError, OSError) as fault:  # out of memory, no such kernel, disk full
            yield case.key, str(fault).splitlines()[0]
        _free(place)


def _swept(
    family: Family, cases: Sequence[Case], place: Place, end: float
) -> Iterator[Row | Fault]:
    """Let a family go through its cases itself; ranks of one job all do, with cases or without."""
    assert family.sweep is not None
    rows = family.sweep(cases, place, end)
    while True:
        try:
            with _sampler(place) as sampler:
                found = next(rows, None)
        except (RuntimeError, OSError, MeshwrightError) as fault:
            yield family.name, str(fault).splitlines()[0]
            return
        if found is None:
            return
        yield replace(found, telemetry=sampler.telemetry()) if isinstance(found, Row) else found


def _row(family: Family, case: Case, place: Place, timer: GpuTimer | HostTimer) -> Row | None:
    work = family.work(case, place)
    if work is None:
        return None
    with _sampler(place) as sampler:
        timed = timer.time(work)
    loaded = isinstance(timer, GpuTimer) and timer.loaded
    row = row_of(case, timed, flops=work.flops, bytes=work.bytes, loaded=loaded)
    return replace(row, telemetry=sampler.telemetry())


def _sampler(place: Place) -> "Sampler | _Silent":
    return Sampler(place.device) if place.on_gpu else _Silent()


class _Silent:
    """Stands where nobody can be asked."""

    def __enter__(self) -> "_Silent":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @staticmethod
    def telemetry() -> None:
        """Nothing is known."""


def _free(place: Place) -> None:
    gc.collect()
    if place.on_gpu:
        import torch

        torch.cuda.empty_cache()


def read(path: Path, machine: Machine | None = None) -> Bench:
    """Read a file of rows: the machine first, then a row a line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        found = msgspec.json.decode(lines[0], type=Machine) if lines else None
    except msgspec.MsgspecError:
        found = None
    if found is None:
        what, fix = "is no file of `mw bench`", "give the file that `mw bench -o FILE` wrote"
        raise InputError([Problem(str(path), what, fix)])
    if machine is not None and found.fingerprint != machine.fingerprint:
        what = f"was measured on another machine ({found.device}, torch {found.torch})"
        raise InputError([Problem(str(path), what, "name another file with -o, or remove this")])
    rows = list[Row]()
    for number, line in enumerate(lines[1:], start=2):
        try:
            rows.append(msgspec.json.decode(line, type=Row))
        except msgspec.MsgspecError as fault:
            if number == len(lines):
                break  # the bench was ended while it wrote
            problem = Problem(f"{path}, line {number}", str(fault), "remove the line")
            raise InputError([problem]) from None
    return Bench(found, tuple(rows))


def _append(path: Path, value: Machine | Row) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(value) + b"\n")


def _mend(path: Path) -> None:
    """Drop a last line that was cut while it was written."""
    whole = path.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end != len(whole):
        with path.open("r+b") as file:
            file.truncate(end)
