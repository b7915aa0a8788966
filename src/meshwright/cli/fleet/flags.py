"""The account of a store, as `mw fleet report` and `mw fleet top` ask for it."""

import argparse
import os
import time
from typing import NamedTuple

from meshwright.cli.flags.time_range import parse_time
from meshwright.cli.parser import add_common
from meshwright.errors import InputError, Problem
from meshwright.fleet.account.report import OutsideAttempts
from meshwright.fleet.store import FleetStore
from meshwright.fleet.time_format import format_day


class FleetScope(NamedTuple):
    """The stretch of time that is asked for, and for which clusters."""

    since_s: float
    until_s: float
    where: str | None


def add_scope(parser: argparse.ArgumentParser) -> None:
    """Add what both commands may be told of the fleet."""
    parser.add_argument("--cluster", metavar="NAME", help="only this one")
    parser.add_argument(
        "--gpus", action="append", default=[], metavar="[NAME=]N",
        help="GPUs of a cluster of which no nodes are told; may be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--redact", action="store_true",
        help="pseudonyms for users, always the same for one store, for reports that are shared",
    )  # fmt: skip


def read_scope(store: FleetStore, args: argparse.Namespace) -> FleetScope:
    """Say which time is meant: up to now, or to the last that is known where that is earlier."""
    lasts = [size.last_s for size in store.table_sizes().values() if size.last_s is not None]
    if not lasts:
        fix = "read some first: mw fleet ingest SOURCE"
        rows = any(size.num_rows for size in store.table_sizes().values())
        what = "nothing in this store tells a time" if rows else "this store holds nothing"
        raise InputError([Problem(str(store.folder), what, fix)])
    if max(lasts) <= 0:
        what = "this store holds nodes, and nothing that tells a time"
        fix = "read jobs or samples of them too: mw fleet ingest SOURCE"
        raise InputError([Problem(str(store.folder), what, fix)])
    now_s = min(time.time(), _known_until(store, max(lasts)))
    until_s = parse_time(args.until, "--until", now_s) if args.until else now_s
    since_s = parse_time(args.since, "--since", until_s)
    if since_s >= until_s:
        what = f"{args.since} is not before {format_day(until_s)}, where the time asked for ends"
        raise InputError([Problem("", what, "let it begin earlier, or end later")])
    if args.cluster and args.cluster not in store.list_clusters():
        there = ", ".join(store.list_clusters())
        raise InputError([Problem("--cluster", f"{args.cluster!r} is not in the store", there)])
    name = (args.cluster or "").replace("'", "''")
    return FleetScope(since_s, until_s, f"cluster = '{name}'" if name else None)


def count_outside(store: FleetStore, scope: FleetScope) -> OutsideAttempts | None:
    """Count the attempts of the store that held nothing in the time that is asked for."""
    row = store.sql(
        f"""
        SELECT count(*) AS total, min(start_s) AS first_s, max(coalesce(end_s, seen_s)) AS last_s,
            count(*) FILTER (WHERE start_s >= {scope.until_s!r} OR end_s <= {scope.since_s!r})
            AS num_outside
        FROM jobs WHERE start_s IS NOT NULL AND {scope.where or "true"}
        """
    ).to_pylist()[0]
    if not row["total"]:
        return None
    return OutsideAttempts(row["num_outside"], row["total"], row["first_s"], row["last_s"])


def shift_scope_back(scope: FleetScope) -> FleetScope:
    """Return the same length of time right before."""
    return scope._replace(since_s=2 * scope.since_s - scope.until_s, until_s=scope.since_s)


def _known_until(store: FleetStore, last_s: float) -> float:
    """Return the last moment that is known: something ended, or jobs were seen running or waiting.

    Of an old trace, jobs that never ended were seen when it was read: that tells nothing of then.
    """
    seen = store.sql(
        "SELECT max(seen_s) AS seen_s FROM jobs "
        "WHERE end_s IS NULL AND state IN ('running', 'pending')"
    )["seen_s"][0].as_py()
    return seen if seen is not None and last_s < seen < last_s + 7 * 86_400 else last_s


STORE_VARIABLE = "MESHWRIGHT_FLEET"


def add_store(parser: argparse.ArgumentParser) -> None:
    """Add the flag that names the store, and those every command has."""
    parser.add_argument(
        "--store", metavar="FOLDER", default=os.environ.get(STORE_VARIABLE, "fleet"),
        help=f"where telemetry is kept (default: fleet, or ${STORE_VARIABLE})",
    )  # fmt: skip
    add_common(parser)


def open_store(args: argparse.Namespace, *, create: bool = False) -> FleetStore:
    """Open the store that was named."""
    return FleetStore(args.store, create=create)
