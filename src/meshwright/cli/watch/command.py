"""`mw watch -- COMMAND`: runs a job and watches it; `status` and `stacks` look at one that runs."""

import argparse
import contextlib
import os
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from meshwright.cli.parser import add_common
from meshwright.cli.render.terminal import print_result
from meshwright.cli.result import CommandResult
from meshwright.cli.watch.screen import render_stacks, render_status
from meshwright.errors import InputError, Problem
from meshwright.observe.hardware.nvml import open_nvml
from meshwright.observe.watch import job_process
from meshwright.observe.watch.hang_report import group_ranks_by_frame
from meshwright.observe.watch.job_process import build_environment, redact_command
from meshwright.observe.watch.process_table import ProcessTable, is_alive
from meshwright.observe.watch.stack_dump import request_stacks
from meshwright.observe.watch.watch_config import WatchConfig
from meshwright.observe.watch.watch_folder import create_watch_folder, open_watch_folder
from meshwright.observe.watch.watch_status import WatchStatus, read_status
from meshwright.observe.watch.watcher import TICK_S, Watcher
from meshwright.spec.units import parse_bytes, parse_number, parse_seconds

EXAMPLES = (
    "mw watch -- torchrun --nproc-per-node 8 train.py",
    "mw watch --out watch/ --hang-timeout 5min -- python train.py",
    "mw watch status watch/",
    "mw watch stacks watch/",
)
_LOOKS = ("status", "stacks")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw watch [flags] -- COMMAND…  |  mw watch status|stacks FOLDER"
    parser.add_argument("words", nargs="*", metavar="status|stacks FOLDER", help="look at a watch")
    given = WatchConfig()
    parser.add_argument("--out", metavar="FOLDER", help="where to write (watch-DATE-TIME)")
    parser.add_argument(
        "--max-overhead", metavar="PERCENT", default=f"{100 * given.max_overhead:g}",
        help=f"of the time that watching may take ({100 * given.max_overhead:g})",
    )  # fmt: skip
    parser.add_argument(
        "--capture-interval",
        metavar="N",
        help="capture every N steps instead, whatever it costs",
    )
    parser.add_argument(
        "--with-stack", action="store_true", help="record Python stacks in captures (expensive)"
    )
    parser.add_argument(
        "--slowdown-threshold", metavar="PERCENT", default=f"{100 * given.slowdown_threshold:g}",
        help=f"least rise of the step time that is told ({100 * given.slowdown_threshold:g})",
    )  # fmt: skip
    parser.add_argument(
        "--hang-timeout", metavar="TIME", default=f"{given.hang_timeout_s:g}s",
        help=f"without a step, before stacks are taken ({given.hang_timeout_s:g}s)",
    )  # fmt: skip
    parser.add_argument(
        "--max-captures",
        metavar="N",
        default=str(given.max_captures),
        help=f"captures at most ({given.max_captures})",
    )
    parser.add_argument(
        "--max-capture-bytes",
        metavar="SIZE",
        default="2GB",
        help="bytes of captures at most (2GB)",
    )
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
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


def _settings(args: argparse.Namespace) -> WatchConfig:
    problems: list[Problem] = []

    def within(flag: str, value: float, low: float, high: float) -> float:
        if not low <= value <= high:
            what = f"{value:g} is outside {low:g} to {high:g}"
            problems.append(Problem(flag, what, "give a value between them"))
        return value

    def percent(flag: str, text: str, low: float, high: float) -> float:
        return within(flag, parse_number(text, flag), low, high) / 100

    every = None
    if args.capture_interval is not None:
        flag = "--capture-interval"
        every = int(within(flag, _whole(flag, args.capture_interval), 1, 2**31))
    settings = WatchConfig(
        max_overhead=percent("--max-overhead", args.max_overhead, 0.01, 50),
        capture_interval=every,
        with_stack=args.with_stack,
        slowdown_threshold=percent("--slowdown-threshold", args.slowdown_threshold, 1, 1000),
        hang_timeout_s=within(
            "--hang-timeout", parse_seconds(args.hang_timeout, "--hang-timeout"), 0.5, 1e6
        ),
        max_captures=int(
            within("--max-captures", _whole("--max-captures", args.max_captures), 2, 100_000)
        ),
        max_capture_bytes=int(
            within(
                "--max-capture-bytes",
                parse_bytes(args.max_capture_bytes, "--max-capture-bytes"),
                1e6,
                1e15,
            )
        ),
    )
    if problems:
        raise InputError(problems)
    return settings


def _whole(flag: str, text: str) -> int:
    if not text.isdecimal() or len(text) > 12:
        raise InputError([Problem(flag, f"{text!r} is no whole number", "give one, such as 100")])
    return int(text)


def _watch(args: argparse.Namespace) -> CommandResult:
    settings = _settings(args)
    if shutil.which(args.job[0]) is None:
        what, fix = "is no program that can be started", "give the command as without mw watch"
        raise InputError([Problem(args.job[0], what, fix)])
    out = args.out or f"watch-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    folder = create_watch_folder(
        Path(out), {"record_shapes": settings.record_shapes, "with_stack": settings.with_stack}
    )
    with open_nvml() as gpus:
        watcher = Watcher(folder, settings, redact_command(args.job), gpus)
        code = job_process.run_job(
            args.job,
            build_environment(os.environ, folder),
            watcher.on_job_start,
            watcher.tick,
            TICK_S,
        )
        status = watcher.on_job_exit(code)
    answer = _answer(status, out)
    if not (args.json or args.quiet):
        # The job's own output is on stdout: what watching has to say must not mix with it.
        with contextlib.redirect_stdout(sys.stderr):
            print_result(answer, "auto")
    return answer._replace(views=(), exit_code=code)


def _answer(status: WatchStatus, out: str) -> CommandResult:
    data = msgspec.to_builtins(status)
    del data["format"]
    quiet = (f"{status.steps}\t{status.step_ms or 0:.3f}\t{100 * status.overhead_share:.3f}",)
    return CommandResult("watch/2", {"folder": out, **data}, render_status(status, out), quiet)


def _status(path: Path) -> CommandResult:
    status = read_status(open_watch_folder(path).status)
    if status.exit_code is None and not is_alive(status.watcher_pid):
        note = "the watcher is gone without a word: this is what it last wrote"
        status = msgspec.structs.replace(status, notes=(*status.notes, note))
    return _answer(status, str(path))


def _stacks(path: Path) -> CommandResult:
    folder = open_watch_folder(path)
    processes = ProcessTable(folder)
    processes.refresh()
    for process in processes.processes.values():
        process.is_gone = not is_alive(process.announcement.pid)
    standings = request_stacks(folder, processes.list_reachable_processes())
    rows = group_ranks_by_frame(standings)
    data = {
        "positions": [{"ranks": list(ranks), "position": place} for ranks, place in rows],
        "processes": [
            {
                "rank": one.rank,
                "pid": one.pid,
                "missing_reason": one.missing_reason,
                "stacks": [[str(frame) for frame in stack.frames] for stack in one.stacks],
            }
            for one in standings
        ],
    }
    quiet = tuple(f"{one.rank}\t{one.position_text}" for one in standings)
    return CommandResult(
        "watch-stacks/2", data, render_stacks(standings, rows), quiet, 0 if standings else 1
    )
