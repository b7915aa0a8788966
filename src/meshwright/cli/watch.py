"""`mw watch -- COMMAND`: runs a job and watches it; `status` and `stacks` look at one that runs."""

import argparse
import contextlib
import os
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from meshwright.cli.answer import Answer
from meshwright.cli.parser import add_common
from meshwright.cli.render import show
from meshwright.cli.watch_screen import screen, stacks_screen
from meshwright.errors import InputError, Problem
from meshwright.observe.watch import job
from meshwright.observe.watch.command_line import shown
from meshwright.observe.watch.environment import environment
from meshwright.observe.watch.folder import make_folder, open_folder
from meshwright.observe.watch.gpus import open_gpus
from meshwright.observe.watch.processes import Processes, is_alive
from meshwright.observe.watch.settings import Settings
from meshwright.observe.watch.stacks import ask
from meshwright.observe.watch.standstill import places
from meshwright.observe.watch.status import Status, read_status
from meshwright.observe.watch.watcher import TICK_S, Watcher
from meshwright.spec.units import parse_bytes, parse_number, parse_seconds

EXAMPLES = (
    "mw watch -- torchrun --nproc-per-node 8 train.py",
    "mw watch --out watch/ --patience 5min -- python train.py",
    "mw watch status watch/",
    "mw watch stacks watch/",
)
_LOOKS = ("status", "stacks")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw watch [flags] -- COMMAND…  |  mw watch status|stacks FOLDER"
    parser.add_argument("words", nargs="*", metavar="status|stacks FOLDER", help="look at a watch")
    given = Settings()
    parser.add_argument("--out", metavar="FOLDER", help="where to write (watch-DATE-TIME)")
    parser.add_argument(
        "--budget", metavar="PERCENT", default=f"{100 * given.budget:g}",
        help=f"of the time that watching may take ({100 * given.budget:g})",
    )  # fmt: skip
    parser.add_argument(
        "--every", metavar="N", help="capture every N steps instead, whatever it costs"
    )
    parser.add_argument(
        "--stack", action="store_true", help="record Python stacks in captures (dear)"
    )
    parser.add_argument(
        "--slowdown", metavar="PERCENT", default=f"{100 * given.slowdown:g}",
        help=f"least rise of the step time that is told ({100 * given.slowdown:g})",
    )  # fmt: skip
    parser.add_argument(
        "--patience", metavar="TIME", default=f"{given.patience_s:g}s",
        help=f"without a step, before stacks are taken ({given.patience_s:g}s)",
    )  # fmt: skip
    parser.add_argument(
        "--keep", metavar="N", default=str(given.keep), help=f"captures at most ({given.keep})"
    )
    parser.add_argument(
        "--keep-bytes", metavar="SIZE", default="2GB", help="bytes of captures at most (2GB)"
    )
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Run the job to its end, or look at a watch."""
    if args.words:
        if args.job or len(args.words) != 2 or args.words[0] not in _LOOKS:
            what = f"{' '.join(args.words)!r} is neither a look nor a job"
            fix = "write mw watch -- COMMAND, or mw watch status FOLDER, or mw watch stacks FOLDER"
            raise InputError([Problem("watch", what, fix)])
        look, path = args.words
        return _status(Path(path)) if look == "status" else _stacks(Path(path))
    if not args.job:
        fix = "write mw watch -- torchrun … train.py"
        raise InputError([Problem("watch", "there is no job to watch", fix)])
    return _watch(args)


def _settings(args: argparse.Namespace) -> Settings:
    problems: list[Problem] = []

    def within(flag: str, value: float, low: float, high: float) -> float:
        if not low <= value <= high:
            what = f"{value:g} is outside {low:g} to {high:g}"
            problems.append(Problem(flag, what, "give a value between them"))
        return value

    every = None
    if args.every is not None:
        every = int(within("--every", _whole("--every", args.every), 1, 2**31))
    settings = Settings(
        budget=within("--budget", parse_number(args.budget, "--budget"), 0.01, 50) / 100,
        every=every,
        stack=args.stack,
        slowdown=within("--slowdown", parse_number(args.slowdown, "--slowdown"), 1, 1000) / 100,
        patience_s=within("--patience", parse_seconds(args.patience, "--patience"), 0.5, 1e6),
        keep=int(within("--keep", _whole("--keep", args.keep), 2, 100_000)),
        keep_bytes=int(
            within("--keep-bytes", parse_bytes(args.keep_bytes, "--keep-bytes"), 1e6, 1e15)
        ),
    )
    if problems:
        raise InputError(problems)
    return settings


def _whole(flag: str, text: str) -> int:
    if not text.isdecimal() or len(text) > 12:
        raise InputError([Problem(flag, f"{text!r} is no whole number", "give one, such as 100")])
    return int(text)


def _watch(args: argparse.Namespace) -> Answer:
    settings = _settings(args)
    if shutil.which(args.job[0]) is None:
        what, fix = "is no program that can be started", "give the command as without mw watch"
        raise InputError([Problem(args.job[0], what, fix)])
    out = args.out or f"watch-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    folder = make_folder(Path(out), {"shapes": settings.shapes, "stack": settings.stack})
    with open_gpus() as gpus:
        watcher = Watcher(folder, settings, shown(args.job), gpus)
        code = job.run(
            args.job, environment(os.environ, folder), watcher.started, watcher.tick, TICK_S
        )
        status = watcher.ended(code)
    answer = _answer(status, out)
    if not (args.json or args.quiet):
        # The job's own output is on stdout: what watching has to say must not mix with it.
        with contextlib.redirect_stdout(sys.stderr):
            show(answer, "auto")
    return answer._replace(views=(), code=code)


def _answer(status: Status, out: str) -> Answer:
    data = msgspec.to_builtins(status)
    quiet = (f"{status.steps}\t{status.step_ms or 0:.3f}\t{100 * status.overhead:.3f}",)
    return Answer("watch/1", {"folder": out, **data}, screen(status, out), quiet)


def _status(path: Path) -> Answer:
    status = read_status(open_folder(path).status)
    if status.code is None and not is_alive(status.watcher):
        note = "the watcher is gone without a word: this is what it last wrote"
        status = msgspec.structs.replace(status, notes=(*status.notes, note))
    return _answer(status, str(path))


def _stacks(path: Path) -> Answer:
    folder = open_folder(path)
    processes = Processes(folder)
    processes.look()
    for process in processes.all.values():
        process.gone = not is_alive(process.said.pid)
    standings = ask(folder, processes.to_ask())
    rows = places(standings)
    data = {
        "places": [{"ranks": list(ranks), "place": place} for ranks, place in rows],
        "processes": [
            {
                "rank": one.rank,
                "pid": one.pid,
                "why": one.why,
                "stacks": [[str(frame) for frame in stack.frames] for stack in one.stacks],
            }
            for one in standings
        ],
    }
    quiet = tuple(f"{one.rank}\t{one.place}" for one in standings)
    return Answer(
        "watch-stacks/1", data, stacks_screen(standings, rows), quiet, 0 if standings else 1
    )
