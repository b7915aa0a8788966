"""Spoils files of every format and reads them: `python -m scripts.fuzz_readers --count 200000`.

Every file must end in an answer or an `InputError`: no other exception, no more than a few seconds,
no memory out of proportion, no program started, no file written, no code of the file run. Cases run
in child processes under limits of the system; one that dies is named and the run goes on after it.
A case is made of the seed and its number alone: `--seed 1 --only 4711` repeats it.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NamedTuple

from scripts.fuzzing import worker
from scripts.fuzzing.worker import WEIGHTS, Fault, Maker, Tally, run

_STUCK_S = 60.0
"""A child that stands at one case for so long is ended."""
_SHARE = 5_000
"""Cases a child runs before it is replaced: what leaks from case to case stays small."""


class Report(NamedTuple):
    """What a run came to."""

    cases: int
    seconds: float
    tallies: dict[str, Tally]
    faults: tuple[Fault, ...]


class _Child:
    """One process and where it stands."""

    def __init__(self, maker: Maker, folder: Path, span: tuple[int, int]) -> None:
        context = multiprocessing.get_context("fork")
        self.span = span
        self.at = context.Value("q", span[0] - 1)
        self.pipe, end = context.Pipe(duplex=False)
        folder.mkdir(exist_ok=True)
        self.process = context.Process(target=run, args=(folder, maker, span, self.at, end))
        self.process.start()
        end.close()
        self.seen = span[0], time.monotonic()

    def is_stuck(self) -> bool:
        """Tell whether it has not moved for too long."""
        now = self.at.value
        if now != self.seen[0]:
            self.seen = now, time.monotonic()
        return time.monotonic() - self.seen[1] > _STUCK_S


def fuzz(
    count: int, seed: int, *, jobs: int, shared: Path | None, only: int | None = None
) -> Report:
    """Run so many cases in some processes at a time."""
    began = time.monotonic()
    root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=root) as scratch:
        maker = Maker(Path(scratch), shared, seed)
        worker.write_sound_files(Path(scratch))
        worker.warm_up(Path(scratch), maker)  # children come into being with all imports done
        first = 0 if only is None else only
        last = count if only is None else only + 1
        spans = [(at, min(at + _SHARE, last)) for at in range(first, last, _SHARE)]
        tallies, faults = _run_all(spans, jobs, maker, Path(scratch))
    return Report(last - first, time.monotonic() - began, tallies, tuple(faults))


def _run_all(
    spans: list[tuple[int, int]], jobs: int, maker: Maker, scratch: Path
) -> tuple[dict[str, Tally], list[Fault]]:
    left = spans[::-1]
    free = [scratch / f"child{n}" for n in range(jobs)]
    running: dict[Connection, tuple[_Child, Path]] = {}
    tallies: dict[str, Tally] = {}
    faults: list[Fault] = []
    while left or running:
        while left and free:
            folder = free.pop()
            child = _Child(maker, folder, left.pop())
            running[child.pipe] = child, folder
        for pipe in list(wait(list(running), timeout=5.0)):
            assert isinstance(pipe, Connection)
            child, folder = running[pipe]
            try:
                said = pipe.recv()
            except EOFError:
                del running[pipe]
                free.append(folder)
                left += _ended(child, faults)
                continue
            if isinstance(said, Fault):
                faults.append(said)
            else:
                for reader, tally in said.items():
                    tallies[reader] = _sum(tallies.get(reader, Tally()), tally)
        for child, _ in running.values():
            if child.is_stuck():
                child.process.kill()
    return tallies, faults


def _ended(child: _Child, faults: list[Fault]) -> list[tuple[int, int]]:
    """Say what a child died of, and what is left of its cases."""
    child.process.join()
    at, end = child.at.value, child.span[1]
    if at < child.span[0]:
        raise RuntimeError("a child died before its first case: see above")
    if at >= end and child.process.exitcode == 0:
        return []
    faults.append(Fault(at, "?", f"the process died (exit code {child.process.exitcode})"))
    return [(at + 1, end)] if at + 1 < end else []


def _sum(a: Tally, b: Tally) -> Tally:
    return Tally(
        a.answered + b.answered, a.damaged + b.damaged, a.refused + b.refused,
        max(a.longest_s, b.longest_s), max(a.grown_bytes, b.grown_bytes),
    )  # fmt: skip


def _print(report: Report, seed: int) -> None:
    print(f"{'reader':22}{'cases':>9}{'answered':>10}{'damaged':>9}{'refused':>9}"
          f"{'longest':>10}{'grown':>9}")  # fmt: skip
    for reader in WEIGHTS:
        each = report.tallies.get(reader, Tally())
        cases = each.answered + each.damaged + each.refused
        print(f"{reader:22}{cases:9,}{each.answered:10,}{each.damaged:9,}{each.refused:9,}"
              f"{each.longest_s:8.2f} s{each.grown_bytes >> 20:5} MiB")  # fmt: skip
    rate = report.cases / max(report.seconds, 1e-9)
    print(f"{report.cases:,} cases in {report.seconds:.0f} s ({rate:,.0f} a second), "
          f"{len(report.faults)} faults")  # fmt: skip
    for fault in report.faults:
        print(f"\n{fault.reader}: {fault.what}")
        print(f"repeat: python -m scripts.fuzz_readers --seed {seed} --only {fault.number}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; exit code 1 where a case went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", type=int, metavar="NUMBER", help="this one case")
    parser.add_argument("--shared", type=Path, default=Path("../shared"), help="real files")
    args = parser.parse_args(arguments)
    report = fuzz(args.count, args.seed, jobs=args.jobs, shared=args.shared, only=args.only)
    _print(report, args.seed)
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
