"""Hold plans against published layouts, and keep what was found as a dated result.

    python -m validation.plans.run --jobs 16
    python -m validation.plans.run --limit 5        a fair sample, to try it out
    python -m validation.plans.run --every          rows with assumed fields as well

Every question is asked once, however many published layouts answer it. What is known is kept beside
the result as it is found (`.parts.jsonl`), so a run that was stopped goes on where it was, as long
as neither the code nor the settings have changed. `--seconds` ends a run by itself; the result then
holds what is known so far and says how much is missing.
"""

import argparse
import datetime as dt
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

import msgspec

from benchmarks.machine import Machine, describe
from meshwright.predict.validation.training import read_runs
from validation.plans.compare import Compared, Settings, compare
from validation.plans.questions import RUNS, Group, groups, published

RESULTS = Path(__file__).with_name("results")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found on one day."""

    date: str
    """UTC day, `YYYY-MM-DD`."""
    machine: Machine
    jobs: int
    """Questions asked at once."""
    settings: Settings
    unread: int
    """Rows that cannot be predicted or were not timed."""
    missing: int
    """Questions that were not asked."""
    compared: tuple[Compared, ...]


class _Part(msgspec.Struct, frozen=True):
    """A line of what is known, with the settings it was found under."""

    settings: Settings
    compared: Compared


def read_parts(path: Path, settings: Settings) -> dict[str, Compared]:
    """Return what earlier runs with the same settings found; a torn last line is left out."""
    found: dict[str, Compared] = {}
    lines = path.read_bytes().splitlines() if path.exists() else []
    for number, line in enumerate(lines):
        try:
            part = msgspec.json.decode(line, type=_Part)
        except msgspec.DecodeError:
            if number + 1 < len(lines):
                raise
            continue
        if part.settings == settings:
            found[part.compared.key] = part.compared
    return found


def workers(jobs: int) -> ProcessPoolExecutor:
    """Return processes that begin afresh: forks of one with threads can hang."""
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))


def ask(
    todo: Iterable[Group], settings: Settings, pool: ProcessPoolExecutor, jobs: int, until_s: float
) -> Iterator[Compared]:
    """Yield answers as they come; no question is begun after a moment of the monotonic clock.

    A question that fails is named and left out, so that it does not take the others with it.
    """
    waiting = iter(todo)
    running: dict[Future[Compared], Group] = {}
    while True:
        while len(running) < jobs and time.monotonic() < until_s:
            group = next(waiting, None)
            if group is None:
                break
            running[pool.submit(compare, group, settings)] = group
        if not running:
            return
        for one in wait(running, return_when=FIRST_COMPLETED).done:
            group, failure = running.pop(one), one.exception()
            if failure is None:
                yield one.result()
            else:
                sys.stderr.write(f"{group.rows[0].id} failed: {failure!r}\n")


def write(path: Path, result: Result) -> None:
    """Write a result, one line for every question so that changes can be read."""
    head = msgspec.to_builtins(result)
    lines = [msgspec.json.encode(one).decode() for one in head.pop("compared")]
    text = msgspec.json.format(msgspec.json.encode(head), indent=1).decode()
    body = ",\n  ".join(lines)
    path.write_text(f'{text[:-2]},\n "compared": [\n  {body}\n ]\n}}\n', encoding="utf-8")


def read_result(path: Path) -> Result:
    """Read a result."""
    return msgspec.json.decode(path.read_bytes(), type=Result)


def _arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m validation.plans.run")
    usual, today = Settings(), dt.datetime.now(dt.UTC).date()
    parser.add_argument("--jobs", type=int, default=1, help="questions asked at once")
    parser.add_argument("--limit", type=int, help="ask only so many questions")
    parser.add_argument("--every", action="store_true", help="also rows with assumed fields")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin none after")
    parser.add_argument("--search-s", type=float, default=usual.search_s)
    parser.add_argument("--longest-s", type=float, default=usual.longest_s)
    parser.add_argument("--draws", type=int, default=usual.draws)
    parser.add_argument("--tries", type=int, default=usual.tries)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{today}.json")
    found = parser.parse_args(words)
    found.today = str(today)
    return found


def main(words: Sequence[str]) -> int:
    """Ask, keep and say how far it got."""
    given, began = _arguments(words), time.monotonic()
    settings = Settings(
        search_s=given.search_s, longest_s=given.longest_s, draws=given.draws, tries=given.tries
    )
    given.out.parent.mkdir(parents=True, exist_ok=True)
    parts = given.out.with_suffix(".parts.jsonl")
    known, rows = read_parts(parts, settings), read_runs(RUNS)
    with workers(given.jobs) as pool, parts.open("ab") as file:
        ready = list(pool.map(published, rows, chunksize=8))
        wanted = [group for group in groups(ready) if group.full or given.every][: given.limit]
        todo = [group for group in wanted if group.key not in known]
        for one in ask(todo, settings, pool, given.jobs, began + given.seconds):
            known[one.key] = one
            file.write(msgspec.json.encode(_Part(settings, one)) + b"\n")
            file.flush()
            _say(one, sum(group.key in known for group in wanted), len(wanted))
    compared = tuple(known[group.key] for group in wanted if group.key in known)
    result = Result(
        date=given.today,
        machine=describe(),
        jobs=given.jobs,
        settings=settings,
        unread=sum(row is None for row in ready),
        missing=len(wanted) - len(compared),
        compared=compared,
    )
    write(given.out, result)
    sys.stdout.write(f"{len(compared)} of {len(wanted)} questions in {given.out}\n")
    return 1 if result.missing else 0


def _say(one: Compared, done: int, of: int) -> None:
    first = one.rows[0]
    plan = "no plan" if one.plan_step_s is None else f"plan {one.plan_step_s:.4g} s"
    least = min((row.published_step_s for row in one.rows if row.fits), default=float("nan"))
    rank = "" if first.rank is None else f"rank {first.rank.share:.1%}, "
    sys.stderr.write(
        f"{done}/{of} {first.id}: {plan}, published {least:.4g} s, {rank}"
        f"search {one.search_s:.0f} s, draws {one.drawn}/{one.tried} in {one.sample_s:.0f} s"
        f"{', ' + one.trouble if one.trouble else ''}\n"
    )


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
