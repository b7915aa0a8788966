"""`read_account`: the GPU-hour account of a store for the scope that a command was given."""

import argparse

import pyarrow as pa
import pyarrow.compute as pc

from meshwright.cli.fleet.flags import FleetScope
from meshwright.errors import InputError, Problem
from meshwright.fleet.account import GpuHourAccount, build_account
from meshwright.fleet.account.redaction import load_redaction_key, redact_column
from meshwright.fleet.store import WINDOW_S, FleetStore
from meshwright.spec.units import parse_count

_JOBS = (
    "cluster", "job", "attempt", "scheduler_id", "user", "team", "partition", "state", "reason",
    "workload",
    "submit_s", "eligible_s", "start_s", "end_s", "gpus", "gpu_kind", "num_nodes", "nodes",
    "gpu_util", "seen_s",
)  # fmt: skip


_ROLLUPS = (
    "cluster", "node", "gpu", "time_s", "gpu_util_mean", "engine_active_mean", "sm_active_mean",
    "tensor_active_mean",
)  # fmt: skip


_HOUR_S = 3600


def read_account(store: FleetStore, args: argparse.Namespace, scope: FleetScope) -> GpuHourAccount:
    """Account for the time that is asked for, from all that the store has of it."""
    since_s, until_s, where = scope
    sizes = store.table_sizes()

    def rows(
        name: str, since: float, until: float, columns: tuple[str, ...] | None = None
    ) -> pa.Table | None:
        return (
            store.read_table(name, columns, since, until, where) if sizes[name].num_rows else None
        )

    jobs = store.read_table("jobs", _JOBS, since_s, until_s, where)
    jobs = redact_column(jobs, load_redaction_key(store.folder)) if args.redact else jobs

    def rollups(since: float, until: float) -> tuple[pa.Table, int] | None:
        # What is old may have been rolled up further.
        for name, width_s in (("gpu_rollups_5m", WINDOW_S), ("gpu_rollups_1h", _HOUR_S)):
            # One that begins before may reach into this time.
            found = rows(name, since - width_s, until, _ROLLUPS)
            if found is not None and found.num_rows:
                return found, width_s
        return None

    progress = None
    if sizes["progress"].num_rows and jobs.num_rows:
        # Which work was lost is known from checkpoints of an attempt's whole life.
        first_s = pc.min(jobs["start_s"]).as_py()
        progress = store.read_table("progress", None, first_s, None, where)
    return build_account(
        jobs, rows("nodes", since_s, until_s), since_s=since_s, until_s=until_s,
        allocations=rows("allocations", since_s, until_s), rollups=rollups, progress=progress,
        gpus=_gpus(args, store),
    )  # fmt: skip


def _gpus(args: argparse.Namespace, store: FleetStore) -> dict[str, int]:
    """Read `--gpus 512` or `--gpus east=512`."""
    clusters, found = store.list_clusters(), {}
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
