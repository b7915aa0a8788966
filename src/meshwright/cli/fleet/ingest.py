"""`mw fleet ingest SOURCE…`: reads telemetry into the store, each row once."""

import argparse
import os
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from meshwright.cli.flags.source_options import add_source_options, read_source_options
from meshwright.cli.flags.time_range import add_times, read_time_range
from meshwright.cli.fleet.flags import add_store, open_store
from meshwright.cli.render.safe_text import print_to_stderr
from meshwright.cli.result import CommandResult, NoteView, make_fields, make_table
from meshwright.control_characters import escape_control_characters
from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.fleet.ingestion import IngestResult, ingest
from meshwright.fleet.sources.source import Secret, SourceOptions, TelemetrySource
from meshwright.fleet.sources.source_registry import SOURCE_KINDS, open_source
from meshwright.fleet.store import FleetStore, RetentionPolicy, RetentionResult, TableSize
from meshwright.fleet.time_format import format_day
from meshwright.spec.units import (
    format_bytes,
    format_quantity,
    format_seconds,
    parse_number,
    parse_seconds,
)

EXAMPLES = (
    "mw fleet ingest slurm: --since 7d",
    "mw fleet ingest http://prometheus:9090 --cluster east --since 1d --step 30s",
    "mw fleet ingest sacct.txt scontrol.json gpu_samples.parquet --cluster east",
    "mw fleet ingest http://prometheus:9090 slurm: --every 5min --keep-samples 14",
    "mw fleet ingest",
)
TOKEN_VARIABLE = "MESHWRIGHT_FLEET_TOKEN"
_LEAST_EVERY_S = 5.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument(
        "sources", nargs="*", metavar="SOURCE",
        help="file, folder, http(s)://… of Prometheus, slurm:, slurm+http://…, kubernetes:; "
        "none: say what the store holds",
    )  # fmt: skip
    parser.add_argument(
        "--kind", metavar="KIND", default="", help=f"what SOURCE is: {', '.join(SOURCE_KINDS)}"
    )
    parser.add_argument(
        "--cluster", metavar="NAME", default="", help="its name, where a source does not tell it"
    )
    add_times(parser)
    parser.add_argument(
        "--step", metavar="TIME", default="30s", help="how far samples are apart (default: 30s)"
    )
    parser.add_argument(
        "--from-start",
        action="store_true",
        help="read from the beginning, not from where it was left",
    )
    parser.add_argument("--every", metavar="TIME", help="go on reading, this often, until stopped")
    add_source_options(parser)
    parser.add_argument(
        "--replace", action="store_true",
        help="let jobs of a file replace those of another file that have the same names",
    )  # fmt: skip
    access = parser.add_argument_group("access (reading is all that is needed)")
    access.add_argument(
        "--token-file", metavar="FILE",
        help=f"bearer token of a server, read from a file (or ${TOKEN_VARIABLE}); never kept",
    )  # fmt: skip
    access.add_argument(
        "--ca-file", metavar="FILE", default="", help="certificates to check a server against"
    )
    keeping = parser.add_argument_group("how long things are kept (for ever, where not given)")
    for name, help_ in (
        ("samples", "samples; their 5-minute rollups stay"),
        ("rollups-5m", "5-minute rollups; 1-hour rollups stay"),
        ("rollups-1h", "1-hour rollups"),
        ("records", "jobs, nodes, events and the like, after their end"),
    ):
        keeping.add_argument(f"--keep-{name}", metavar="DAYS", help=f"days to keep {help_}")
    add_store(parser)


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with what came in and what is held."""
    limits = _limits(args)
    if args.every is not None and not args.sources:
        raise InputError([Problem("--every", "there is no source to read", "name a source")])
    if not args.sources:
        with open_store(args) as store:
            return _answer(store, [], None if limits is None else store.apply_retention(limits))
    asked = _asked(args)
    # All are opened before any is read, so that a wrong name is told at once.
    sources = [open_source(where, asked, args.kind) for where in args.sources]
    with open_store(args, create=True) as store:
        if args.every is not None:
            _go_on(args, store, sources, limits)
        done = [_one(args, store, source) for source in sources]
        return _answer(store, done, None if limits is None else store.apply_retention(limits))


def _one(args: argparse.Namespace, store: FleetStore, source: TelemetrySource) -> IngestResult:
    def told(so_far: IngestResult) -> None:
        if not args.quiet and sys.stderr.isatty():
            rows = sum(so_far.total)
            line = f"{so_far.source}: {rows:,} rows, {format_seconds(so_far.duration_s)}"
            shown = escape_control_characters(line[:100])
            print(f"\r\x1b[K{shown}", end="", file=sys.stderr, flush=True)

    try:
        return ingest(
            store, source, from_start=args.from_start, progress=told, replace=args.replace
        )
    finally:
        if not args.quiet and sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _go_on(
    args: argparse.Namespace,
    store: FleetStore,
    sources: list[TelemetrySource],
    limits: RetentionPolicy | None,
) -> None:
    """Read again and again; a source that fails is told and tried the next time."""
    every_s = parse_seconds(args.every, "--every")
    if every_s < _LEAST_EVERY_S:
        raise InputError([Problem("--every", f"{args.every} is too often", "use 5s or more")])
    due_s = time.monotonic()
    while True:
        for source in sources:
            try:
                found = _one(args, store, source)
            except MeshwrightError as error:
                print_to_stderr(f"{_clock()} {source.name}: {error}")
                continue
            if not args.quiet:
                put = found.total
                line = f"{put.new:,} new, {put.updates:,} changed, {put.duplicates:,} known"
                print_to_stderr(f"{_clock()} {source.name}: {line}")
        if limits is not None:
            store.apply_retention(limits)
        args.from_start = False
        due_s = max(due_s + every_s, time.monotonic())
        time.sleep(due_s - time.monotonic())


def _clock() -> str:
    return datetime.now(UTC).strftime("%H:%M:%SZ")


def _asked(args: argparse.Namespace) -> SourceOptions:
    since_s, until_s = read_time_range(args)
    step_s = parse_seconds(args.step, "--step")
    if step_s <= 0:
        raise InputError([Problem("--step", f"{args.step} is no distance", "use 30s")])
    options, columns = read_source_options(args)

    def tell(said: str) -> None:
        if not args.quiet:
            print_to_stderr(said)

    return SourceOptions(
        args.cluster, since_s, until_s, step_s, _token(args), args.ca_file, options, tell, columns
    )


def _token(args: argparse.Namespace) -> Secret:
    if not args.token_file:
        return Secret(os.environ.get(TOKEN_VARIABLE, "").strip())
    try:
        return Secret(Path(args.token_file).read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise InputError([Problem(args.token_file, f"cannot read: {reason}")]) from None


def _limits(args: argparse.Namespace) -> RetentionPolicy | None:
    given = {
        name: parse_number(text, f"--keep-{name.replace('_', '-')}")
        for name in RetentionPolicy._fields
        if (text := getattr(args, f"keep_{name}")) is not None
    }
    return (
        RetentionPolicy(**{name: given.get(name) for name in RetentionPolicy._fields})
        if given
        else None
    )


def _answer(
    store: FleetStore, done: list[IngestResult], kept: RetentionResult | None
) -> CommandResult:
    sizes = {name: one for name, one in store.table_sizes().items() if one.num_rows}
    data = {
        "store": str(store.folder),
        "clusters": list(store.list_clusters()),
        "sources": [
            {
                "source": one.source,
                "tables": {name: put._asdict() for name, put in one.tables.items()},
                "notes": [{"note": note, "times": times} for note, times in one.notes.items()],
                "duration_s": one.duration_s,
            }
            for one in done
        ],
        "stored": {name: one._asdict() for name, one in sizes.items()},
        "deleted_rows": {} if kept is None else kept.deleted_rows,
    }
    came = [
        (one.source, name, *(f"{number:,}" for number in put))
        for one in done
        for name, put in one.tables.items()
    ]
    columns = "source, table, new, known, changed, too late"
    views = (
        [make_table(columns, came, "Read", right="new, known, changed, too late")] if came else []
    )
    rows = [
        (name, f"{one.num_rows:,}", format_bytes(one.size_bytes), *_from_to(one))
        for name, one in sizes.items()
    ]
    kept_columns = "table, rows, size, from, to"
    title = f"Held in {store.folder}"
    views.append(make_table(kept_columns, rows, title, right="rows, size"))
    if kept is not None and kept.deleted_rows:
        gone = {name: format_quantity(count, "row") for name, count in kept.deleted_rows.items()}
        return CommandResult(
            "fleet-ingest/2",
            data,
            (*views, make_fields(gone, "Let go"), *_notes(done)),
            _quiet(done),
        )
    return CommandResult("fleet-ingest/2", data, (*views, *_notes(done)), _quiet(done))


def _quiet(done: Iterable[IngestResult]) -> tuple[str, ...]:
    return tuple(f"{one.total.new} {one.total.updates} {one.total.duplicates}" for one in done)


def _notes(done: Iterable[IngestResult]) -> Iterable[NoteView]:
    for one in done:
        if not one.tables and not one.notes:
            yield NoteView(f"{one.source}: nothing new; --from-start reads it from the beginning")
        for note, count in one.notes.items():
            yield NoteView(f"{one.source}: {note}" + (f" ({count} times)" if count > 1 else ""))


def _from_to(size: TableSize) -> tuple[str, str]:
    # A list of nodes that tells no times stands at nought, where traces without dates begin.
    if not size.first_s and not size.last_s:
        return "", ""
    first, last = (None if one is None else format_day(one) for one in (size.first_s, size.last_s))
    return first or "", last or ""
