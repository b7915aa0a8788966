"""The account of a store, as `mw fleet report` and `mw fleet top` ask for it."""

import argparse
import time
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from meshwright.cli.fleet_times import day, moment
from meshwright.errors import InputError, Problem
from meshwright.observe.fleet.account import Account, account
from meshwright.observe.fleet.account.redact import key_of, redacted
from meshwright.observe.fleet.store import WINDOW_S, Store
from meshwright.spec.units import parse_count

_JOBS = (
    "cluster", "job", "attempt", "number", "user", "team", "partition", "state", "reason", "work",
    "submit_s", "eligible_s", "start_s", "end_s", "gpus", "gpu_kind", "num_nodes", "nodes",
    "gpu_util", "seen_s",
)  # fmt: skip
_ROLLUPS = (
    "cluster", "node", "gpu", "time_s", "gpu_util_mean", "engine_active_mean", "sm_active_mean",
    "tensor_active_mean",
)  # fmt: skip
_HOUR_S = 3600


class Asked(NamedTuple):
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


def asked(store: Store, args: argparse.Namespace) -> Asked:
    """Say which time is meant: up to now, or to the last that is known where that is earlier."""
    lasts = [held.last_s for held in store.held().values() if held.last_s is not None]
    if not lasts:
        fix = "read some first: mw fleet ingest SOURCE"
        rows = any(held.rows for held in store.held().values())
        what = "nothing in this store tells a time" if rows else "this store holds nothing"
        raise InputError([Problem(str(store.folder), what, fix)])
    if max(lasts) <= 0:
        what = "this store holds nodes, and nothing that tells a time"
        fix = "read jobs or samples of them too: mw fleet ingest SOURCE"
        raise InputError([Problem(str(store.folder), what, fix)])
    now_s = min(time.time(), _known_until(store, max(lasts)))
    until_s = moment(args.until, "--until", now_s) if args.until else now_s
    since_s = moment(args.since, "--since", until_s)
    if since_s >= until_s:
        what = f"{args.since} is not before {day(until_s)}, where the time asked for ends"
        raise InputError([Problem("", what, "let it begin earlier, or end later")])
    if args.cluster and args.cluster not in store.clusters():
        there = ", ".join(store.clusters())
        raise InputError([Problem("--cluster", f"{args.cluster!r} is not in the store", there)])
    name = (args.cluster or "").replace("'", "''")
    return Asked(since_s, until_s, f"cluster = '{name}'" if name else None)


def earlier(scope: Asked) -> Asked:
    """Return the same length of time right before."""
    return scope._replace(since_s=2 * scope.since_s - scope.until_s, until_s=scope.since_s)


def _known_until(store: Store, last_s: float) -> float:
    """Return the last moment that is known: something ended, or jobs were seen running or waiting.

    Of an old trace, jobs that never ended were seen when it was read: that tells nothing of then.
    """
    seen = store.sql(
        "SELECT max(seen_s) AS seen_s FROM jobs "
        "WHERE end_s IS NULL AND state IN ('running', 'pending')"
    )["seen_s"][0].as_py()
    return seen if seen is not None and last_s < seen < last_s + 7 * 86_400 else last_s


def account_of(store: Store, args: argparse.Namespace, scope: Asked) -> Account:
    """Account for the time that is asked for, from all that the store has of it."""
    since_s, until_s, where = scope
    held = store.held()

    def rows(
        name: str, since: float, until: float, columns: tuple[str, ...] | None = None
    ) -> pa.Table | None:
        return store.table(name, columns, since, until, where) if held[name].rows else None

    jobs = store.table("jobs", _JOBS, since_s, until_s, where)
    jobs = redacted(jobs, key_of(store.folder)) if args.redact else jobs

    def rollups(since: float, until: float) -> tuple[pa.Table, int] | None:
        # What is old may have been rolled up further.
        for name, width_s in (("windows", WINDOW_S), ("hours", _HOUR_S)):
            # One that begins before may reach into this time.
            found = rows(name, since - width_s, until, _ROLLUPS)
            if found is not None and found.num_rows:
                return found, width_s
        return None

    progress = None
    if held["progress"].rows and jobs.num_rows:
        # Which work was lost is known from checkpoints of an attempt's whole life.
        first_s = pc.min(jobs["start_s"]).as_py()
        progress = store.table("progress", None, first_s, None, where)
    return account(
        jobs, rows("nodes", since_s, until_s), since_s=since_s, until_s=until_s,
        held=rows("held", since_s, until_s), rollups=rollups, progress=progress,
        gpus=_gpus(args, store),
    )  # fmt: skip


def _gpus(args: argparse.Namespace, store: Store) -> dict[str, int]:
    """Read `--gpus 512` or `--gpus east=512`."""
    clusters, found = store.clusters(), {}
    for text in args.gpus:
        name, _, number = text.rpartition("=")
        if not name and len(clusters) == 1:
            name = clusters[0]
        if name not in clusters:
            what = f"{text!r} does not say of which cluster"
            fix = f"write --gpus {clusters[0]}={number}" if clusters else "ingest jobs first"
            raise InputError([Problem("--gpus", what, fix)])
        found[name] = parse_count(number, "--gpus")
    return found
