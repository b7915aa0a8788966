"""`mw analyze PATH`: where the time of a run goes, what is wrong with it, and what to do next."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from meshwright.cli.analyze.achieved_rate import compare_with_calibration
from meshwright.cli.analyze.data import overview_to_data
from meshwright.cli.analyze.screen import render_overview
from meshwright.cli.flags.calibration import add_calibration
from meshwright.cli.flags.trace_input import (
    open_cache,
    parse_number_list,
    read_capture,
    read_num_workers,
)
from meshwright.cli.parser import add_common
from meshwright.cli.render.files import write_text
from meshwright.cli.result import CommandResult, NoteView
from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.observe.overview import RunOverview, TraceSelection, analyze_run
from meshwright.timeline.readers.nccl_log.nccl_log_reader import read_nccl_log
from meshwright.timeline.readers.trace_folder import TraceFile, find_traces
from meshwright.timeline.readers.trace_formats import FORMATS

_LOGS = frozenset({"nccl log"})

_GRAPHS = frozenset({"execution trace", "chakra"})

_TIMELINES = frozenset(one.name for one in FORMATS if one.reader) - _GRAPHS


def find_untimed_files(paths: Sequence[str]) -> tuple[str, list[Path]]:
    """What the paths hold: `nccl log` or `execution trace` with the files, or nothing.

    A folder with timelines among its files is one of timelines.
    """
    found = [file for path in paths for file in _found(path)]
    names = {file.format for file in found}
    for kind, those in (("nccl log", _LOGS), ("execution trace", _GRAPHS)):
        if names & those and not names & _TIMELINES and not names & (_LOGS | _GRAPHS) - those:
            return kind, [file.path for file in found if file.format in those]
    if len(paths) > 1:
        what = f"are several paths, of: {', '.join(sorted(names))}"
        fix = "give one trace, one folder of ranks, or only logs of NCCL's or execution traces"
        raise InputError([Problem(" ".join(paths), what, fix)])
    return "", []


def _found(path: str) -> tuple[TraceFile, ...]:
    try:
        return find_traces(path)
    except InputError:
        # A job may print much before NCCL does: then only the whole file tells.
        if not Path(path).is_file() or not _is_log(Path(path)):
            raise
        return (TraceFile(Path(path), "nccl log", 0),)


def _is_log(path: Path) -> bool:
    try:
        read_nccl_log(path)
    except DamagedFile:
        return True
    except InputError:
        return False
    return True


EXAMPLES = (
    "mw analyze trace.json.gz",
    "mw analyze traces/ --html report.html",
    "mw analyze traces/ --ranks 0-3 --steps 11,12 --json",
    "mw analyze nccl-*.log",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw analyze PATH… [flags]"
    parser.add_argument(
        "paths", metavar="PATH", nargs="+",
        help="a trace (PyTorch profiler, Nsight Systems SQLite, our own), or a folder of ranks; "
        "logs of NCCL's or execution traces, one or several",
    )  # fmt: skip
    parser.add_argument("--ranks", metavar="LIST", help="only these ranks: 3, or 0-3,7")
    parser.add_argument("--steps", metavar="LIST", help="only these steps: 11, or 11-13")
    parser.add_argument(
        "--capture", metavar="N",
        help="of several captures of each rank the N-th, from 1 (the last that all have)",
    )  # fmt: skip
    parser.add_argument("--num-workers", metavar="N", default="1", help="read with N processes")
    parser.add_argument(
        "--ray", action="store_true", help="read as tasks of a Ray cluster (RAY_ADDRESS)"
    )
    parser.add_argument(
        "--compat", choices=("hta",),
        help="print the figures of Holistic Trace Analysis 0.5, by its rules",
    )  # fmt: skip
    parser.add_argument(
        "--annotation", metavar="TEXT",
        help="with --compat hta: the critical path of its second instance (ProfilerStep)",
    )  # fmt: skip
    parser.add_argument("--html", metavar="FILE", help="write a report with charts, in one file")
    parser.add_argument(
        "--perfetto", metavar="FILE",
        help="write the trace with findings and the critical path marked: .json or .json.gz",
    )  # fmt: skip
    parser.add_argument(
        "--no-cache", action="store_true", help="neither use nor keep what was read before"
    )
    add_calibration(parser)
    add_common(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with one screen; write the files that were asked for."""
    args.path = args.paths[0]
    other = _without_times(args)
    if other is not None:
        return other
    if args.compat == "hta":
        if args.html or args.perfetto or args.steps:
            what = "prints figures only, of whole traces"
            fix = "leave out --html, --perfetto and --steps"
            raise InputError([Problem("--compat hta", what, fix)])
        from meshwright.cli.analyze.hta_compat import run_hta_compat

        ranks = parse_number_list("--ranks", args.ranks)
        return run_hta_compat(
            args.path,
            ranks,
            annotation=args.annotation,
            cache=open_cache(args),
            capture=read_capture(args),
        )
    if args.annotation:
        what = "is for the critical path as HTA tells it"
        raise InputError([Problem("--annotation", what, "add --compat hta, or leave it out")])
    wanted = TraceSelection(
        parse_number_list("--ranks", args.ranks), parse_number_list("--steps", args.steps)
    )
    found = analyze_run(
        args.path,
        selection=wanted,
        num_workers=read_num_workers(args),
        use_ray=args.ray,
        capture=read_capture(args),
        cache=open_cache(args),
        with_strips=bool(args.html),
    )
    notes = [NoteView(line) for line in found.damaged]
    measured = compare_with_calibration(args, found)
    notes += _written(args, found, wanted, measured.description)
    return CommandResult(
        "analyze/2",
        {**overview_to_data(found), "of_measured": measured.data},
        (*render_overview(found, measured.description), *notes),
        quiet_lines=_quiet(found),
        exit_code=1 if found.damaged else 0,
    )


def _without_times(args: argparse.Namespace) -> CommandResult | None:
    """What logs and execution traces say; None where there is a timeline to analyze."""
    from meshwright.cli.analyze.command import find_untimed_files

    kind, files = find_untimed_files(args.paths)
    if not kind:
        return None
    flags = {"--html": args.html, "--perfetto": args.perfetto, "--ranks": args.ranks,
             "--steps": args.steps, "--compat": args.compat}  # fmt: skip
    given = [flag for flag, value in flags.items() if value]
    if kind == "nccl log":
        _refuse(given, files[0], "a log of NCCL's")
        from meshwright.cli.analyze.nccl_log import summarize_nccl_logs

        return summarize_nccl_logs(files)
    from meshwright.cli.analyze.execution_trace import analyze_operators, read_execution_traces

    graphs, damaged = read_execution_traces(files)
    if len(args.paths) == 1 and any(n.start_us is not None for one in graphs for n in one.nodes):
        return None
    _refuse(given, files[0], "an execution trace")
    return analyze_operators(graphs, damaged)


def _refuse(flags: Sequence[str], path: Path, what: str) -> None:
    if flags:
        fix = f"leave out {', '.join(flags)}, or give the trace of PyTorch's profiler"
        raise InputError([Problem(str(path), f"is {what}, which has no times", fix)])


def _written(
    args: argparse.Namespace, found: RunOverview, wanted: TraceSelection, measured: str
) -> list[NoteView]:
    notes = []
    if args.html:
        from meshwright.cli.analyze.page import render_report

        write_text(args.html, render_report(found, measured))
        notes.append(NoteView(f"wrote {args.html}: open it in a browser"))
    if args.perfetto:
        from meshwright.observe.analyze.annotated_trace import write_annotated_trace

        write_annotated_trace(
            Path(args.path),
            args.perfetto,
            found.findings or (),
            wanted,
            cache=open_cache(args),
            capture=read_capture(args),
        )
        notes.append(NoteView(f"wrote {args.perfetto}: open it at ui.perfetto.dev"))
    return notes


def _quiet(found: RunOverview) -> tuple[str, ...]:
    """One line per rank: rank, then percent of compute, communication, copies and idle."""
    lines = []
    for one in found.ranks:
        parts = one.breakdown
        shares = (
            parts.compute_ns,
            parts.exposed_communication_ns,
            parts.exposed_memory_copy_ns,
            parts.idle_ns,
        )
        lines.append("\t".join([str(one.rank), *(f"{100 * parts.share(x):.2f}" for x in shares)]))
    return tuple(lines)
