"""`mw timeline show|perfetto|repair`: look into a recorded timeline, open it in Perfetto."""

import argparse
import shlex
from pathlib import Path

from meshwright.cli.parser import add_common, add_verbs
from meshwright.cli.render.progress import show_progress
from meshwright.cli.result import CommandResult, NoteView, TextView, View, make_fields, make_table
from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.file_errors import convert_os_errors
from meshwright.spec.units import format_seconds
from meshwright.timeline import (
    Timeline,
    count_spans,
    read_timeline,
    repair_timeline,
    write_perfetto,
)

EXAMPLES = (
    "mw timeline show runs/train-tiny",
    "mw timeline perfetto demo-out/timeline demo-out/trace.json.gz",
)

_VERBS = (
    ("show", "how much time each kind of span takes on each rank", (EXAMPLES[0],)),
    ("perfetto", "write a file that the Perfetto UI opens", (EXAMPLES[1],)),
    (
        "repair",
        "close the files that a killed writer left open",
        ("mw timeline repair run/timeline",),
    ),
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs and their flags."""
    found = add_verbs(parser, _VERBS)
    for sub in found.values():
        sub.add_argument(
            "folder", metavar="FOLDER", help="folder of Parquet files, one per rank; or a run's"
        )
    found["perfetto"].add_argument("out", metavar="OUT", help="file to write: .json or .json.gz")
    for sub in found.values():
        add_common(sub)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer one of the verbs."""
    with convert_os_errors(Path(args.folder), "read"):
        if not Path(args.folder).exists():
            problem = Problem(args.folder, "there is no such folder", "name a timeline folder")
            raise InputError([problem])
        folder = _of_run(Path(args.folder))
    if args.verb == "perfetto":
        return _perfetto(folder, args.out, quiet=args.quiet or args.json)
    return _repair(folder) if args.verb == "repair" else _show(folder)


def _of_run(folder: Path) -> str:
    """Return the folder of a timeline, which may be given as that of the run it belongs to."""
    inner = folder / "timeline"
    if not inner.is_dir() and not (folder / "metrics.jsonl").is_file():
        return str(folder)
    if any(folder.glob("rank-*.parquet*")):
        return str(folder)
    for found in (inner, inner / "profile"):  # one device has its profiled steps in the first
        if any(found.glob("rank-*.parquet*")):
            return str(found)
    what = "is a run without a timeline"
    fix = (
        "several ranks record one unless logging.timeline is false; mw train --profile-steps "
        "does too"
    )
    raise InputError([Problem(str(folder), what, fix)])


def _notes(damaged: list[str], folder: str) -> list[NoteView]:
    """Say what is damaged, and what may mend it."""
    line = shlex.join(("mw", "timeline", "repair", folder))
    mending = f"{line} closes files that a killed writer left open"
    return [NoteView(text) for text in (*damaged, mending)] if damaged else []


def _show(folder: str) -> CommandResult:
    damaged: list[str] = []
    try:
        timeline = read_timeline(folder, columns=["rank", "kind", "start_ns", "duration_ns"])
    except DamagedFile as damage:
        if not isinstance(damage.readable, Timeline):
            raise
        timeline = damage.readable
        damaged = list(map(str, damage.problems))
    rows = _busy(timeline)
    first, last = timeline.extent_ns
    length_s = (last - first) / 1e9
    head = {
        "source": timeline.source.value,
        "spans": f"{timeline.num_spans:,}",
        "ranks": len(timeline.ranks),
        "length": format_seconds(length_s),
        "counter values": f"{timeline.counters.num_rows:,}" if timeline.counters.num_rows else None,
        **timeline.metadata,
    }
    shown = [(rank, kind, f"{count:,}", format_seconds(busy)) for rank, kind, count, busy in rows]
    data = {
        "source": timeline.source.value,
        "spans": timeline.num_spans,
        "ranks": list(timeline.ranks),
        "length_s": length_s,
        "metadata": dict(timeline.metadata),
        "kinds": [
            {"rank": rank, "kind": kind, "spans": count, "total_s": busy}
            for rank, kind, count, busy in rows
        ],
        "damaged": damaged,
    }
    views: tuple[View, ...] = (
        make_fields(head),
        make_table("rank, kind, spans, summed time", shown, right="rank, spans, summed time"),
        *_notes(damaged, folder),
    )
    return CommandResult("timeline/1", data, views, (str(timeline.num_spans),), 1 if damaged else 0)


def _busy(timeline: Timeline) -> list[tuple[int, str, int, float]]:
    """Sum the spans of each rank by kind, in seconds; nested spans count again."""
    rows = []
    for part in timeline.split_by_rank():
        (rank,) = part.ranks
        kinds, duration = part.string_column("kind"), part.column("duration_ns")
        for code, kind in enumerate(kinds.values):
            mine = duration[kinds.codes == code]
            if mine.size:
                rows.append((rank, str(kind), int(mine.size), float(mine.sum()) / 1e9))
    return rows


def _perfetto(folder: str, out: str, *, quiet: bool) -> CommandResult:
    damaged: list[str] = []
    try:
        with show_progress("writing", count_spans(folder), quiet=quiet) as advance:
            write_perfetto(folder, out, progress=advance)
    except DamagedFile as damage:
        damaged = list(map(str, damage.problems))
    line = f"wrote {out}: open it at ui.perfetto.dev"
    views: tuple[View, ...] = (TextView(line), *_notes(damaged, folder))
    data = {"file": out, "damaged": damaged}
    return CommandResult("timeline.perfetto/1", data, views, (out,), 1 if damaged else 0)


def _repair(folder: str) -> CommandResult:
    repaired = repair_timeline(folder)
    body = "\n".join(repaired.repaired) or "nothing was mended"
    notes = tuple(NoteView(f"still damaged: {line}") for line in repaired.damaged)
    if not repaired.repaired and not notes:
        body = "nothing to repair"
    data = {"mended": list(repaired.repaired), "damaged": list(repaired.damaged)}
    code = 1 if notes else 0
    return CommandResult(
        "timeline.repair/1", data, (TextView(body), *notes), repaired.repaired, code
    )
