"""`mw analyze PATH`: where the time of a run goes, what is wrong with it, and what to do next."""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from meshwright.cli.analyze_data import overview_data
from meshwright.cli.analyze_measured import of_measured
from meshwright.cli.analyze_screen import screen
from meshwright.cli.answer import Answer, Note
from meshwright.cli.calibrations import add_calibration
from meshwright.cli.files import write_text
from meshwright.cli.parser import add_common
from meshwright.errors import InputError, Problem
from meshwright.observe.runs import Overview, Wanted, overview
from meshwright.timeline.readers.cache import Cache, user_cache

EXAMPLES = (
    "mw analyze trace.json.gz",
    "mw analyze traces/ --html report.html",
    "mw analyze traces/ --rank 0-3 --steps 11,12 --json",
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
    parser.add_argument("--rank", metavar="LIST", help="only these ranks: 3, or 0-3,7")
    parser.add_argument("--steps", metavar="LIST", help="only these steps: 11, or 11-13")
    parser.add_argument(
        "--capture", metavar="N",
        help="of several captures of each rank the N-th, from 1 (the last that all have)",
    )  # fmt: skip
    parser.add_argument("--jobs", metavar="N", default="1", help="read with N processes")
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


def run(args: argparse.Namespace) -> Answer:
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
        from meshwright.cli.analyze_hta import hta

        ranks = numbers("--rank", args.rank)
        return hta(
            args.path,
            ranks,
            annotation=args.annotation,
            cache=cache_of(args),
            capture=capture_of(args),
        )
    if args.annotation:
        what = "is for the critical path as HTA tells it"
        raise InputError([Problem("--annotation", what, "add --compat hta, or leave it out")])
    wanted = Wanted(numbers("--rank", args.rank), numbers("--steps", args.steps))
    found = overview(
        args.path,
        wanted=wanted,
        jobs=jobs_of(args),
        on_ray=args.ray,
        capture=capture_of(args),
        cache=cache_of(args),
        pictures=bool(args.html),
    )
    notes = [Note(line) for line in found.damaged]
    measured = of_measured(args, found)
    notes += _written(args, found, wanted, measured.words)
    return Answer(
        "analyze/1",
        {**overview_data(found), "of_measured": measured.data},
        (*screen(found, measured.words), *notes),
        quiet=_quiet(found),
        code=1 if found.damaged else 0,
    )


def _without_times(args: argparse.Namespace) -> Answer | None:
    """What logs and execution traces say; None where there is a timeline to analyze."""
    from meshwright.cli.analyze_untimed import files_of

    kind, files = files_of(args.paths)
    if not kind:
        return None
    flags = {"--html": args.html, "--perfetto": args.perfetto, "--rank": args.rank,
             "--steps": args.steps, "--compat": args.compat}  # fmt: skip
    given = [flag for flag, value in flags.items() if value]
    if kind == "nccl log":
        _refuse(given, files[0], "a log of NCCL's")
        from meshwright.cli.analyze_log import nccl_logs

        return nccl_logs(files)
    from meshwright.cli.analyze_operators import operators, read_graphs

    graphs, damaged = read_graphs(files)
    if len(args.paths) == 1 and any(n.start_us is not None for one in graphs for n in one.nodes):
        return None
    _refuse(given, files[0], "an execution trace")
    return operators(graphs, damaged)


def _refuse(flags: Sequence[str], path: Path, what: str) -> None:
    if flags:
        fix = f"leave out {', '.join(flags)}, or give the trace of PyTorch's profiler"
        raise InputError([Problem(str(path), f"is {what}, which has no times", fix)])


def _written(
    args: argparse.Namespace, found: Overview, wanted: Wanted, measured: str
) -> list[Note]:
    notes = []
    if args.html:
        from meshwright.cli.analyze_page import report

        write_text(args.html, report(found, measured))
        notes.append(Note(f"wrote {args.html}: open it in a browser"))
    if args.perfetto:
        from meshwright.observe.annotated import write_annotated

        write_annotated(
            Path(args.path),
            args.perfetto,
            found.findings or (),
            wanted,
            cache=cache_of(args),
            capture=capture_of(args),
        )
        notes.append(Note(f"wrote {args.perfetto}: open it at ui.perfetto.dev"))
    return notes


def _quiet(found: Overview) -> tuple[str, ...]:
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


def cache_of(args: argparse.Namespace) -> Cache | None:
    """The cache that a command reads through."""
    return None if args.no_cache else user_cache()


def jobs_of(args: argparse.Namespace) -> int:
    """How many processes read."""
    if not re.fullmatch(r"[1-9]\d{0,3}", args.jobs):
        fix = "give a whole number from 1, such as the cores of this machine"
        raise InputError([Problem("--jobs", f"{args.jobs!r} is no number of processes", fix)])
    return int(args.jobs)


def capture_of(args: argparse.Namespace) -> int | None:
    """Which capture of each rank is looked at; None for the last that all have."""
    if args.capture is None:
        return None
    if not re.fullmatch(r"[1-9]\d{0,5}", args.capture):
        fix = "give a whole number: 1 for the first that was recorded"
        raise InputError([Problem("--capture", f"{args.capture!r} is no number", fix)])
    return int(args.capture)


def numbers(flag: str, text: str | None) -> frozenset[int]:
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
