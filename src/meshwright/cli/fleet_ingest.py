"""`mw fleet ingest SOURCE…`: reads telemetry into the store, each row once."""

import argparse
import os
import sys
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from meshwright.cli.answer import Answer, Note, facts, table
from meshwright.cli.fleet_store import add_store, open_store
from meshwright.cli.fleet_times import add_times, day, times
from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.observe.fleet.ingest import Ingested, ingest
from meshwright.observe.fleet.sources import KINDS, Asked, Secret, Source, find
from meshwright.observe.fleet.store import Held, Kept, Limits, Store
from meshwright.spec.units import (
    format_bytes,
    format_seconds,
    format_some,
    parse_number,
    parse_seconds,
)

EXAMPLES = (
    "mw fleet ingest slurm: --since 7d",
    "mw fleet ingest http://prometheus:9090 --cluster east --since 1d --step 30s",
    "mw fleet ingest sacct.txt scontrol.json samples.parquet --cluster east",
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
        "--kind", metavar="KIND", default="", help=f"what SOURCE is: {', '.join(KINDS)}"
    )
    parser.add_argument(
        "--cluster", metavar="NAME", default="", help="its name, where a source does not tell it"
    )
    add_times(parser)
    parser.add_argument(
        "--step", metavar="TIME", default="30s", help="how far samples are apart (default: 30s)"
    )
    parser.add_argument(
        "--again", action="store_true", help="read from the beginning, not from where it was left"
    )
    parser.add_argument("--every", metavar="TIME", help="go on reading, this often, until stopped")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE",
        help="what one kind of source alone understands; may be repeated",
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
        ("samples", "samples; their 5-minute windows stay"),
        ("windows", "5-minute windows; windows of an hour stay"),
        ("hours", "windows of an hour"),
        ("others", "jobs, nodes, events and the like, after their end"),
    ):
        keeping.add_argument(f"--keep-{name}", metavar="DAYS", help=f"days to keep {help_}")
    add_store(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with what came in and what is held."""
    limits = _limits(args)
    if args.every is not None and not args.sources:
        raise InputError([Problem("--every", "there is no source to read", "name a source")])
    if not args.sources:
        with open_store(args) as store:
            return _answer(store, [], None if limits is None else store.keep(limits))
    asked = _asked(args)
    # All are opened before any is read, so that a wrong name is told at once.
    sources = [find(where, asked, args.kind) for where in args.sources]
    with open_store(args, create=True) as store:
        if args.every is not None:
            _go_on(args, store, sources, limits)
        done = [_one(args, store, source) for source in sources]
        return _answer(store, done, None if limits is None else store.keep(limits))


def _one(args: argparse.Namespace, store: Store, source: Source) -> Ingested:
    def told(so_far: Ingested) -> None:
        if not args.quiet and sys.stderr.isatty():
            rows = sum(so_far.total)
            line = f"{so_far.source}: {rows:,} rows, {format_seconds(so_far.took_s)}"
            print(f"\r\x1b[K{line[:100]}", end="", file=sys.stderr, flush=True)

    try:
        return ingest(store, source, again=args.again, progress=told)
    finally:
        if not args.quiet and sys.stderr.isatty():
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _go_on(
    args: argparse.Namespace, store: Store, sources: list[Source], limits: Limits | None
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
                print(f"{_clock()} {source.name}: {error}", file=sys.stderr)
                continue
            if not args.quiet:
                put = found.total
                line = f"{put.new:,} new, {put.newer:,} changed, {put.same:,} known"
                print(f"{_clock()} {source.name}: {line}", file=sys.stderr)
        if limits is not None:
            store.keep(limits)
        args.again = False
        due_s = max(due_s + every_s, time.monotonic())
        time.sleep(due_s - time.monotonic())


def _clock() -> str:
    return datetime.now(UTC).strftime("%H:%M:%SZ")


def _asked(args: argparse.Namespace) -> Asked:
    since_s, until_s = times(args)
    step_s = parse_seconds(args.step, "--step")
    if step_s <= 0:
        raise InputError([Problem("--step", f"{args.step} is no distance", "use 30s")])
    options = {}
    for text in args.option:
        name, equals, value = text.partition("=")
        if not equals or not name:
            what = f"{text!r} is no NAME=VALUE"
            raise InputError([Problem("--option", what, "write --option name=value")])
        options[name] = value

    def tell(said: str) -> None:
        if not args.quiet:
            print(said, file=sys.stderr, flush=True)

    return Asked(args.cluster, since_s, until_s, step_s, _token(args), args.ca_file, options, tell)


def _token(args: argparse.Namespace) -> Secret:
    if not args.token_file:
        return Secret(os.environ.get(TOKEN_VARIABLE, "").strip())
    try:
        return Secret(Path(args.token_file).read_text(encoding="utf-8").strip())
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise InputError([Problem(args.token_file, f"cannot be read: {reason}")]) from None


def _limits(args: argparse.Namespace) -> Limits | None:
    given = {
        name: parse_number(text, f"--keep-{name}")
        for name in Limits._fields
        if (text := getattr(args, f"keep_{name}")) is not None
    }
    return Limits(**{name: given.get(name) for name in Limits._fields}) if given else None


def _answer(store: Store, done: list[Ingested], kept: Kept | None) -> Answer:
    held = {name: one for name, one in store.held().items() if one.rows}
    data = {
        "store": str(store.folder),
        "clusters": list(store.clusters()),
        "sources": [
            {
                "source": one.source,
                "tables": {name: put._asdict() for name, put in one.tables.items()},
                "notes": [{"note": note, "times": times} for note, times in one.notes.items()],
                "took_s": one.took_s,
            }
            for one in done
        ],
        "held": {name: one._asdict() for name, one in held.items()},
        "let_go": {} if kept is None else kept.rows,
    }
    came = [
        (one.source, name, *(f"{number:,}" for number in put))
        for one in done
        for name, put in one.tables.items()
    ]
    columns = "source, table, new, known, changed, too late"
    views = [table(columns, came, "Read", right="new, known, changed, too late")] if came else []
    rows = [
        (name, f"{one.rows:,}", format_bytes(one.size), *_from_to(one))
        for name, one in held.items()
    ]
    kept_columns = "table, rows, size, from, to"
    title = f"Held in {store.folder}"
    views.append(table(kept_columns, rows, title, right="rows, size"))
    if kept is not None and kept.rows:
        gone = {name: format_some(count, "row") for name, count in kept.rows.items()}
        return Answer(
            "fleet-ingest/1", data, (*views, facts(gone, "Let go"), *_notes(done)), _quiet(done)
        )
    return Answer("fleet-ingest/1", data, (*views, *_notes(done)), _quiet(done))


def _quiet(done: Iterable[Ingested]) -> tuple[str, ...]:
    return tuple(f"{one.total.new} {one.total.newer} {one.total.same}" for one in done)


def _notes(done: Iterable[Ingested]) -> Iterable[Note]:
    for one in done:
        if not one.tables and not one.notes:
            yield Note(f"{one.source}: nothing new; --again reads it from the beginning")
        for note, count in one.notes.items():
            yield Note(f"{one.source}: {note}" + (f" ({count} times)" if count > 1 else ""))


def _from_to(held: Held) -> tuple[str, str]:
    # A list of nodes that tells no times stands at nought, where traces without dates begin.
    if not held.first_s and not held.last_s:
        return "", ""
    first, last = (None if one is None else day(one) for one in (held.first_s, held.last_s))
    return first or "", last or ""
