"""Jobs and nodes for `mw queue`, from a fleet's store or from anything that `mw fleet` ingests."""

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from meshwright.cli.flags.source_options import add_source_options, read_source_options
from meshwright.cli.flags.time_range import add_times, read_time_range
from meshwright.errors import InputError, Problem
from meshwright.fleet.sources.source import SourceOptions
from meshwright.fleet.sources.source_registry import open_source
from meshwright.fleet.store import FleetStore, is_store
from meshwright.policy.job_queue.job import JobRequest
from meshwright.policy.job_queue.pool.node_pool import NodeSpec
from meshwright.predict.job_queue.durations import predict_durations
from meshwright.spec.field_checks import check_integer, check_number, raise_problems
from meshwright.spec.units import parse_number

ESTIMATE_KINDS = ("exact", "limit", "predicted")
_COLUMNS = (
    "cluster", "job", "attempt", "name", "user", "team", "partition", "qos", "workload", "submit_s",
    "start_s", "end_s", "time_limit_s", "deadline_s", "priority", "gpus", "gpu_kind", "cpus",
    "memory_requested",
)  # fmt: skip


class QueueWorkload(NamedTuple):
    """Jobs as a scheduler sees them, and how long they really ran."""

    requests: list[JobRequest]
    durations_s: list[float]
    nodes: list[NodeSpec]
    """Nodes that the source tells of; empty where it does not."""
    estimate_kind: str
    """Where estimates come from."""
    skipped: dict[str, int]
    """How many rows are no jobs for a queue, and why."""
    clusters: tuple[str, ...] = ()
    """Whose jobs they are."""
    notes: tuple[str, ...] = ()
    """What the source remarked: rows left out, zones assumed."""


def add_jobs(parser: argparse.ArgumentParser) -> None:
    """Add what says which jobs there are."""
    parser.add_argument(
        "jobs", metavar="JOBS",
        help="a fleet's store, or whatever mw fleet ingest reads: sacct's output, CSV, a trace",
    )  # fmt: skip
    group = parser.add_argument_group("jobs")
    group.add_argument("--cluster", metavar="NAME", help="only jobs and nodes of this cluster")
    group.add_argument(
        "--partition", metavar="NAME", help="only jobs of this partition (queue, virtual cluster)"
    )
    add_times(parser)
    add_source_options(parser)
    group.add_argument(
        "--max-jobs", metavar="N", type=int, help="no more than the first N jobs of that time"
    )
    group.add_argument(
        "--runtime-estimate", choices=ESTIMATE_KINDS,
        help="what the scheduler expects jobs to take: what they took, their limit, or what "
        "earlier jobs took (default: limit where jobs have one, else exact)",
    )  # fmt: skip
    group.add_argument(
        "--arrival-scale", metavar="X", default="1",
        help="let jobs come X times as fast, to see what more load does (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--team", choices=("team", "user", "partition"), default="team",
        help="whose shares and quotas a job counts to (default: team)",
    )  # fmt: skip
    group.add_argument(
        "--qos-priorities", metavar="QOS=N,…",
        help="priorities of jobs by their quality of service; the higher goes first (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--deadline-factor", metavar="X",
        help="deadlines for jobs that have none: X times their run time after they come",
    )  # fmt: skip
    group.add_argument(
        "--elastic-range", metavar="MIN:MAX",
        help="let jobs run on MIN to MAX times the GPUs they ask for: 0.5:2",
    )  # fmt: skip
    group.add_argument(
        "--serial-fraction", metavar="SHARE", default="0.02",
        help="share of a step that more GPUs do not shorten, where jobs change size "
        "(default: 0.02)",
    )  # fmt: skip


def read_jobs(args: argparse.Namespace, *, shared: bool = False) -> QueueWorkload:
    """Read the jobs; those without GPUs count only where GPUs are `shared`."""
    raise_problems([] if args.max_jobs is None else check_integer("--max-jobs", args.max_jobs))
    found = _tables(args)
    tables = _of_cluster(found.tables, args.cluster)
    rows = tables["jobs"].to_pylist()
    asks, run_s, limits, left_out = _asks(rows, args, shared)
    if not asks:
        why = "; ".join(f"{count:,} {text}" for text, count in left_out.items())
        what = f"no job is left to simulate{f' ({why})' if why else ''}"
        raise InputError([Problem(str(args.jobs), what, "name jobs with a start, an end and GPUs")])
    estimate = args.runtime_estimate
    if estimate is None:
        known = sum(limit is not None for limit in limits)
        estimate = "limit" if known * 2 > len(limits) else "exact"
    estimates = _estimates(estimate, asks, run_s, limits, str(args.jobs))
    asks = [change_request(ask, estimate_s=one) for ask, one in zip(asks, estimates, strict=True)]
    clusters = tuple(sorted({row["cluster"] for row in rows if row["cluster"]}))
    return QueueWorkload(
        asks, run_s, _nodes(tables["nodes"]), estimate, left_out, clusters, found.notes
    )


def read_nodes(path: str) -> list[NodeSpec]:
    """Read the nodes that a source tells of."""
    tables = _from_source(path, SourceOptions()).tables
    if not (found := _nodes(tables["nodes"])):
        raise InputError([Problem(path, "tells of no nodes", "name a list of nodes")])
    return found


def change_request(ask: JobRequest, **changes: Any) -> JobRequest:
    """Return a request with other values in some fields."""
    fields = {name: getattr(ask, name) for name in ask.__struct_fields__}
    return JobRequest(**fields | changes)


class _ReadTables(NamedTuple):
    tables: dict[str, pa.Table]
    notes: tuple[str, ...] = ()


def _tables(args: argparse.Namespace) -> _ReadTables:
    since_s, until_s = read_time_range(args)
    options, columns = read_source_options(args)
    where, folder = str(args.jobs), Path(args.jobs)
    if is_store(folder):
        if options or columns:
            flag = "--option" if options else "--column"
            what = "says how a file is read, and this is a store"
            raise InputError([Problem(flag, what, "give it to mw fleet ingest")])
        with FleetStore(folder) as store:
            nodes = store.read_table("nodes")
            jobs = store.read_table("jobs", _COLUMNS, since_s=since_s, until_s=until_s)
            return _ReadTables({"jobs": jobs, "nodes": nodes})
    asked = SourceOptions(since_s=since_s, until_s=until_s, kind_options=options, columns=columns)
    return _from_source(where, asked)


def _from_source(where: str, asked: SourceOptions) -> _ReadTables:
    from meshwright.fleet.tables import TABLE_SCHEMAS

    found: dict[str, list[pa.Table]] = {"jobs": [], "nodes": []}
    notes: dict[str, None] = {}
    for batch in open_source(where, asked).read_batches():
        notes |= dict.fromkeys(batch.notes)
        if batch.table in found:
            found[batch.table].append(batch.rows)
    tables = {
        name: pa.concat_tables(parts) if parts else TABLE_SCHEMAS[name].empty_table()
        for name, parts in found.items()
    }
    told = tuple(note for note in notes if not note.startswith("read as "))
    return _ReadTables(tables, told)


def _of_cluster(tables: dict[str, pa.Table], name: str | None) -> dict[str, pa.Table]:
    """Leave out what is of other clusters, where one is named."""
    if not name:
        return tables
    there = sorted(one for one in pc.unique(tables["jobs"]["cluster"]).to_pylist() if one)
    if name not in there:
        fix = f"use one of {', '.join(there)}" if there else "leave it out: no cluster is told"
        raise InputError([Problem("--cluster", f"there are no jobs of {name!r}", fix)])
    return {key: rows.filter(pc.equal(rows["cluster"], name)) for key, rows in tables.items()}


def _nodes(table: pa.Table) -> list[NodeSpec]:
    """Return each node once, as it last stood."""
    last: dict[tuple[str, str], dict[str, Any]] = {}
    for row in table.to_pylist():
        key = (row["cluster"] or "", row["node"] or "")
        if key not in last or (row["since_s"] or 0) >= (last[key]["since_s"] or 0):
            last[key] = row
    return [
        NodeSpec(
            gpus=int(row["gpus"] or 0),
            gpu_kind=row["gpu_kind"] or "",
            cpus=math.inf if row["cpus"] is None else row["cpus"],
            memory_bytes=math.inf if row["memory"] is None else row["memory"],
        )
        for _, row in sorted(last.items())
        if row["gpus"]
    ]


def _asks(
    rows: list[dict[str, Any]], args: argparse.Namespace, shared: bool
) -> tuple[list[JobRequest], list[float], list[float | None], dict[str, int]]:
    load = parse_number(args.arrival_scale, "--arrival-scale")
    serial = parse_number(args.serial_fraction, "--serial-fraction")
    raise_problems(
        check_number("--arrival-scale", load, 1e-6, 1e6),
        check_number("--serial-fraction", serial, 0.0, 1.0),
    )
    factor = _factor(args.deadline_factor)
    least, most = _elastic(args.elastic_range)
    priorities = parse_named_numbers(args.qos_priorities, "--qos-priorities")
    asks: list[JobRequest] = []
    run_s: list[float] = []
    limits: list[float | None] = []
    left_out: dict[str, int] = {}
    if shared:  # who only comes and stays needs no times
        rows = [row | {"submit_s": row["submit_s"] or 0.0} for row in rows]
    told = [row for row in rows if row["submit_s"] is not None]
    if len(told) < len(rows):
        left_out["do not tell when they were handed in"] = len(rows) - len(told)
    start_s = min((row["submit_s"] for row in told), default=0.0)
    for row in sorted(told, key=lambda one: one["submit_s"]):
        if args.partition and row["partition"] != args.partition:
            continue
        if why := _unfit(row, shared):
            left_out[why] = left_out.get(why, 0) + 1
            continue
        gpus, came_s = float(row["gpus"] or 0), start_s + (row["submit_s"] - start_s) / load
        resized = args.elastic_range is not None and gpus >= 1
        asks.append(
            JobRequest(
                job_id=row["job"] if not row["attempt"] else f"{row['job']}.{row['attempt']}",
                submit_s=came_s,
                gpus=gpus,
                user=row["user"] or "",
                team=row[args.team] or "",
                name=row["name"] or row["workload"] or "",
                priority=priorities.get(row["qos"] or "", row["priority"] or 0.0),
                deadline_s=_deadline(row, came_s, factor),
                gpu_kinds=tuple(kind for kind in (row["gpu_kind"] or "").split("|") if kind),
                cpus=(row["cpus"] or 0.0) if shared else 0.0,
                memory_bytes=(row["memory_requested"] or 0.0) if shared else 0.0,
                min_gpus=max(1.0, math.ceil(gpus * least)) if resized else None,
                max_gpus=max(1.0, math.floor(gpus * most)) if resized else None,
                serial_fraction=serial if resized else 0.0,
            )
        )
        ended = row["end_s"] is not None and row["start_s"] is not None
        run_s.append(row["end_s"] - row["start_s"] if ended else 0.0)
        limits.append(row["time_limit_s"])
        if args.max_jobs is not None and len(asks) == args.max_jobs:
            break
    return asks, run_s, limits, left_out


def _factor(text: str | None) -> float | None:
    if text is None:
        return None
    factor = parse_number(text, "--deadline-factor")
    raise_problems(check_number("--deadline-factor", factor, 1e-3, 1e6))
    return factor


def _deadline(row: dict[str, Any], came_s: float, factor: float | None) -> float | None:
    """Return when a job is due, as long after it comes as was recorded."""
    if row["deadline_s"] is not None:
        return float(came_s + row["deadline_s"] - row["submit_s"])
    if factor is None or row["start_s"] is None or row["end_s"] is None:
        return None
    return float(came_s + factor * (row["end_s"] - row["start_s"]))


def _unfit(row: dict[str, Any], shared: bool) -> str:
    """Say why a row is no job for a queue; empty: it is one."""
    if row["start_s"] is None or row["end_s"] is None:
        return "" if shared else "have not both started and ended"
    if not shared and not row["gpus"]:
        return "have no GPUs"
    if not shared and row["gpus"] != int(row["gpus"]):
        return "share GPUs (see mw queue pack)"
    return "" if shared or row["end_s"] > row["start_s"] else "took no time"


def _elastic(text: str | None) -> tuple[float, float]:
    if text is None:
        return 1.0, 1.0
    parts = text.split(":")
    if len(parts) != 2:
        what = f"{text!r} is not two factors"
        raise InputError([Problem("--elastic-range", what, "use MIN:MAX, such as 0.5:2")])
    least, most = (parse_number(part, "--elastic-range") for part in parts)
    raise_problems(
        check_number("--elastic-range", least, 0.0, 1.0),
        check_number("--elastic-range", most, 1.0, 1e6),
    )
    return least, most


def _estimates(
    how: str, asks: list[JobRequest], run_s: list[float], limits: list[float | None], where: str
) -> list[float]:
    if how == "predicted":
        return predict_durations(asks, run_s)
    if how == "exact":
        return run_s
    if all(limit is None for limit in limits):
        raise InputError([Problem(where, "no job has a limit", "use --runtime-estimate predicted")])
    return [math.inf if limit is None else limit for limit in limits]


def parse_named_numbers(text: str | None, flag: str) -> dict[str, float]:
    """Read names with numbers: `vision=64,speech=32`."""
    found: dict[str, Any] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, equals, value = part.partition("=")
        if not equals:
            what = f"{part!r} names no number"
            raise InputError([Problem(flag, what, "use NAME=N, such as vision=64,speech=32")])
        found[name.strip()] = parse_number(value, flag)
        raise_problems(check_number(flag, found[name.strip()], 0.0, 1e9))
    return found
