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
from meshwright.observe.bench.bench_case import BenchCase, BenchRow
from meshwright.observe.bench.bench_family import (
    BenchFamily,
    BenchTarget,
    FailedCase,
    Size,
    build_row,
)
from meshwright.observe.bench.timing import GpuTimer, HostTimer
from meshwright.observe.hardware.machine import Machine
from meshwright.observe.hardware.telemetry_sampler import TelemetrySampler

ROWS_FORMAT = "meshwright.bench.rows/2"
"""What the first line of a file of rows says beside the machine."""
TIME_BUDGET_S: dict[Size, float] = {"quick": 54.0, "full": 345.0}
"""A minute and six, less what it takes to load torch and to end the last case."""


class BenchResult(NamedTuple):
    """What a file of rows holds."""

    machine: Machine
    rows: tuple[BenchRow, ...]
    failed_cases: tuple[tuple[str, str], ...] = ()
    """Cases that broke, by key, with what they said."""
    unsupported_cases: tuple[str, ...] = ()
    """Those that this machine cannot do."""
    cases_not_reached: tuple[str, ...] = ()
    """Those that there was no time for."""


class BenchProgress(NamedTuple):
    """How far a bench has come."""

    family: BenchFamily
    num_done: int
    num_cases: int
    row: BenchRow | None


def run_bench(
    families: Sequence[BenchFamily],
    place: BenchTarget,
    machine: Machine,
    *,
    size: Size = "full",
    path: Path | None = None,
    budget_s: float | None = None,
    say: Callable[[BenchProgress], None] = lambda _: None,
) -> BenchResult:
    """Measure what is not in the file yet, until all is there or the time is up.

    Families share what is left of the budget as they usually do, so that a slow one cannot use up
    the others' time, and what a quick one leaves is theirs. What the last one leaves goes to those
    that have not come to their end.
    """
    known = dict[str, BenchRow]()
    if path is not None and path.exists():
        known = {row.case.key: row for row in read_bench(path, machine).rows}
        _mend(path)
    end = time.monotonic() + (TIME_BUDGET_S[size] if budget_s is None else budget_s)
    if path is not None and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode_rows(machine, ()))
    rows, failed, unable = list(known.values()), list[FailedCase](), list[str]()
    asked = {family.name: family.cases(size, place.on_gpu) for family in families}
    tried = set(known)

    def left(family: BenchFamily) -> list[BenchCase]:
        return [case for case in asked[family.name] if case.key not in tried]

    def go_through(some: Sequence[BenchFamily]) -> None:
        for number, family in enumerate(some):
            share = family.typical_s[size] / sum(one.typical_s[size] for one in some[number:])
            until = time.monotonic() + (end - time.monotonic()) * share
            for found in _family(family, left(family), place, until):
                match found:
                    case BenchRow():
                        tried.add(found.case.key)
                        rows.append(found)
                        if path is not None:
                            _append(path, found)
                        done = sum(row.case.family == family.name for row in rows)
                        say(BenchProgress(family, done, len(asked[family.name]), found))
                    case BenchCase():
                        tried.add(found.key)
                        unable.append(found.key)
                    case (key, _):
                        tried.add(key)
                        failed.append(found)

    go_through(families)
    # Ranks that sweep together would not know of each other's second round.
    go_through([family for family in families if family.run_all is None and left(family)])
    late = tuple(case.key for family in families for case in left(family))
    return BenchResult(machine, tuple(rows), tuple(failed), tuple(unable), late)


def _family(
    family: BenchFamily, cases: Sequence[BenchCase], place: BenchTarget, end: float
) -> Iterator[BenchRow | BenchCase | FailedCase]:
    """Measure cases until time is up; one that cannot be done here comes back as it is."""
    if family.run_all is not None:
        yield from _swept(family, cases, place, end)
        return
    if not cases or time.monotonic() > end:
        return
    timer: GpuTimer | HostTimer = HostTimer()
    if place.on_gpu and family.runs_on_device:
        timer = GpuTimer(place.device, under_load=family.under_load, warmup_s=family.warmup_s)
    for case in cases:
        if time.monotonic() > end:
            return
        try:
            yield _row(family, case, place, timer) or case
        except (RuntimeError, OSError) as fault:  # out of memory, no such kernel, disk full
            yield case.key, str(fault).splitlines()[0]
        _free(place)


def _swept(
    family: BenchFamily, cases: Sequence[BenchCase], place: BenchTarget, end: float
) -> Iterator[BenchRow | FailedCase]:
    """Let a family go through its cases itself; ranks of one job all do, with cases or without."""
    assert family.run_all is not None
    rows = family.run_all(cases, place, end)
    while True:
        try:
            with _sampler(place) as sampler:
                found = next(rows, None)
        except (RuntimeError, OSError, MeshwrightError) as fault:
            yield family.name, str(fault).splitlines()[0]
            return
        if found is None:
            return
        yield (
            replace(found, telemetry=sampler.summarize()) if isinstance(found, BenchRow) else found
        )


def _row(
    family: BenchFamily, case: BenchCase, place: BenchTarget, timer: GpuTimer | HostTimer
) -> BenchRow | None:
    work = family.prepare(case, place)
    if work is None:
        return None
    with _sampler(place) as sampler:
        timed = timer.time(work)
    loaded = isinstance(timer, GpuTimer) and timer.under_load
    row = build_row(case, timed, flops=work.flops, bytes=work.bytes, loaded=loaded)
    return replace(row, telemetry=sampler.summarize())


def _sampler(place: BenchTarget) -> "TelemetrySampler | _NoTelemetry":
    return TelemetrySampler(place.device) if place.on_gpu else _NoTelemetry()


class _NoTelemetry:
    """Stands where nobody can be asked."""

    def __enter__(self) -> "_NoTelemetry":
        return self

    def __exit__(self, *_: object) -> None:
        return None

    @staticmethod
    def summarize() -> None:
        """Nothing is known."""


def _free(place: BenchTarget) -> None:
    gc.collect()
    if place.on_gpu:
        import torch

        torch.cuda.empty_cache()


def encode_rows(machine: Machine, rows: Sequence[BenchRow]) -> bytes:
    """Return the text of a file of rows, as `read_bench` reads it."""
    first = {"format": ROWS_FORMAT, **msgspec.to_builtins(machine)}
    return b"".join(msgspec.json.encode(line) + b"\n" for line in (first, *rows))


class _Format(msgspec.Struct):
    """Files of the first version do not say theirs."""

    format: str = "meshwright.bench.rows/1"


def read_bench(path: Path, machine: Machine | None = None) -> BenchResult:
    """Read a file of rows: the machine first, then a row a line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        found = msgspec.json.decode(lines[0], type=Machine) if lines else None
    except msgspec.MsgspecError:
        found = None
    if found is None:
        what, fix = "not a `mw bench` file", "give the file that `mw bench -o FILE` wrote"
        raise InputError([Problem(str(path), what, fix)])
    version = msgspec.json.decode(lines[0], type=_Format).format
    if version != ROWS_FORMAT:
        what = f"has the format {version!r}, not {ROWS_FORMAT!r}"
        raise InputError([Problem(str(path), what, "measure again: mw bench -o FILE")])
    if machine is not None and found.fingerprint != machine.fingerprint:
        what = f"was measured on a different machine ({found.device}, torch {found.torch})"
        raise InputError([Problem(str(path), what, "name another file with -o, or remove this")])
    rows = list[BenchRow]()
    for number, line in enumerate(lines[1:], start=2):
        try:
            rows.append(msgspec.json.decode(line, type=BenchRow))
        except msgspec.MsgspecError as fault:
            if number == len(lines):
                break  # the bench was ended while it wrote
            problem = Problem(f"{path}, line {number}", str(fault), "remove the line")
            raise InputError([problem]) from None
    return BenchResult(found, tuple(rows))


def _append(path: Path, value: BenchRow) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(value) + b"\n")


def _mend(path: Path) -> None:
    """Drop a last line that was cut while it was written."""
    whole = path.read_bytes()
    end = whole.rfind(b"\n") + 1
    if end != len(whole):
        with path.open("r+b") as file:
            file.truncate(end)
