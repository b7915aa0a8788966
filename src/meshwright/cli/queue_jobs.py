"""Jobs and nodes for `mw queue`, from a fleet's store or from anything that `mw fleet` ingests."""

import argparse
import math
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from meshwright.cli.fleet_times import add_times, times
from meshwright.errors import InputError, Problem
from meshwright.observe.fleet.sources import Asked, find
from meshwright.observe.fleet.store import Store
from meshwright.policy.queue.ask import Ask
from meshwright.policy.queue.nodes import Node
from meshwright.predict.queue.durations import predicted
from meshwright.spec.bounds import real, require, whole
from meshwright.spec.units import parse_number

ESTIMATES = ("exact", "limit", "predicted")
_COLUMNS = (
    "cluster", "job", "attempt", "name", "user", "team", "partition", "qos", "work", "submit_s",
    "start_s", "end_s", "limit_s", "gpus", "gpu_kind", "cpus", "memory_asked",
)  # fmt: skip


class Read(NamedTuple):
    """Jobs as a scheduler sees them, and how long they really ran."""

    asks: list[Ask]
    run_s: list[float]
    nodes: list[Node]
    """Nodes that the source tells of; empty where it does not."""
    estimate: str
    """Where estimates come from."""
    left_out: dict[str, int]
    """How many rows are no jobs for a queue, and why."""
    clusters: tuple[str, ...] = ()
    """Whose jobs they are."""


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
    group.add_argument(
        "--first", metavar="N", type=int, help="no more than the first N jobs of that time"
    )
    group.add_argument(
        "--estimate", choices=ESTIMATES,
        help="what the scheduler expects jobs to take: what they took, their limit, or what "
        "earlier jobs took (default: limit where jobs have one, else exact)",
    )  # fmt: skip
    group.add_argument(
        "--load", metavar="X", default="1",
        help="let jobs come X times as fast, to see what more load does (default: 1)",
    )  # fmt: skip
    group.add_argument(
        "--team", choices=("team", "user", "partition"), default="team",
        help="whose shares and quotas a job counts to (default: team)",
    )  # fmt: skip
    group.add_argument(
        "--priorities", metavar="QOS=N,…",
        help="priorities of jobs by their quality of service; the higher goes first (default: 0)",
    )  # fmt: skip
    group.add_argument(
        "--elastic", metavar="LEAST:MOST",
        help="let jobs run on LEAST to MOST times the GPUs they ask for: 0.5:2",
    )  # fmt: skip
    group.add_argument(
        "--serial", metavar="SHARE", default="0.02",
        help="share of a step that more GPUs do not shorten, where jobs change size "
        "(default: 0.02)",
    )  # fmt: skip


def read_jobs(args: argparse.Namespace, *, shared: bool = False) -> Read:
    """Read the jobs; those without GPUs count only where GPUs are `shared`."""
    require([] if args.first is None else whole("--first", args.first))
    tables = _of_cluster(_tables(args), args.cluster)
    rows = tables["jobs"].to_pylist()
    asks, run_s, limits, left_out = _asks(rows, args, shared)
    if not asks:
        why = "; ".join(f"{count:,} {text}" for text, count in left_out.items())
        what = f"no job is left to simulate{f' ({why})' if why else ''}"
        raise InputError([Problem(str(args.jobs), what, "name jobs with a start, an end and GPUs")])
    estimate = args.estimate
    if estimate is None:
        known = sum(limit is not None for limit in limits)
        estimate = "limit" if known * 2 > len(limits) else "exact"
    estimates = _estimates(estimate, asks, run_s, limits, str(args.jobs))
    asks = [_with(ask, estimate_s=one) for ask, one in zip(asks, estimates, strict=True)]
    clusters = tuple(sorted({row["cluster"] for row in rows if row["cluster"]}))
    return Read(asks, run_s, _nodes(tables["nodes"]), estimate, left_out, clusters)


def read_nodes(path: str) -> list[Node]:
    """Read the nodes that a source tells of."""
    tables = _from_source(path, Asked())
    if not (found := _nodes(tables["nodes"])):
        raise InputError([Problem(path, "tells of no nodes", "name a list of nodes")])
    return found


def _with(ask: Ask, **changes: Any) -> Ask:
    fields = {name: getattr(ask, name) for name in ask.__struct_fields__}
    return Ask(**fields | changes)


def _tables(args: argparse.Namespace) -> dict[str, pa.Table]:
    since_s, until_s = times(args)
    where, folder = str(args.jobs), Path(args.jobs)
    if folder.is_dir() and (folder / "catalog.sqlite").exists():
        with Store(folder) as store:
            nodes = store.table("nodes")
            return {
                "jobs": store.table("jobs", _COLUMNS, since_s=since_s, until_s=until_s),
                "nodes": nodes,
            }
    return _from_source(where, Asked(since_s=since_s, until_s=until_s))


def _from_source(where: str, asked: Asked) -> dict[str, pa.Table]:
    from meshwright.observe.fleet.tables import TABLES

    found: dict[str, list[pa.Table]] = {"jobs": [], "nodes": []}
    for batch in find(where, asked).batches():
        if batch.table in found:
            found[batch.table].append(batch.rows)
    return {
        name: pa.concat_tables(parts) if parts else TABLES[name].empty_table()
        for name, parts in found.items()
    }


def _of_cluster(tables: dict[str, pa.Table], name: str | None) -> dict[str, pa.Table]:
    """Leave out what is of other clusters, where one is named."""
    if not name:
        return tables
    there = sorted(one for one in pc.unique(tables["jobs"]["cluster"]).to_pylist() if one)
    if name not in there:
        fix = f"use one of {', '.join(there)}" if there else "leave it out: no cluster is told"
        raise InputError([Problem("--cluster", f"there are no jobs of {name!r}", fix)])
    return {key: rows.filter(pc.equal(rows["cluster"], name)) for key, rows in tables.items()}


def _nodes(table: pa.Table) -> list[Node]:
    """Return each node once, as it last stood."""
    last: dict[tuple[str, str], dict[str, Any]] = {}
    for row in table.to_pylist():
        key = (row["cluster"] or "", row["node"] or "")
        if key not in last or (row["since_s"] or 0) >= (last[key]["since_s"] or 0):
            last[key] = row
    return [
        Node(
            gpus=int(row["gpus"] or 0),
            kind=row["gpu_kind"] or "",
            cpus=math.inf if row["cpus"] is None else row["cpus"],
            memory=math.inf if row["memory"] is None else row["memory"],
        )
        for _, row in sorted(last.items())
        if row["gpus"]
    ]


def _asks(
    rows: list[dict[str, Any]], args: argparse.Namespace, shared: bool
) -> tuple[list[Ask], list[float], list[float | None], dict[str, int]]:
    load = parse_number(args.load, "--load")
    serial = parse_number(args.serial, "--serial")
    require(real("--load", load, 1e-6, 1e6), real("--serial", serial, 0.0, 1.0))
    least, most = _elastic(args.elastic)
    priorities = numbers(args.priorities, "--priorities")
    asks: list[Ask] = []
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
        gpus = float(row["gpus"] or 0)
        resized = args.elastic is not None and gpus >= 1
        asks.append(
            Ask(
                job=row["job"] if not row["attempt"] else f"{row['job']}.{row['attempt']}",
                submit_s=start_s + (row["submit_s"] - start_s) / load,
                gpus=gpus,
                user=row["user"] or "",
                team=row[args.team] or "",
                name=row["name"] or row["work"] or "",
                priority=priorities.get(row["qos"] or "", 0.0),
                kinds=tuple(kind for kind in (row["gpu_kind"] or "").split("|") if kind),
                cpus=(row["cpus"] or 0.0) if shared else 0.0,
                memory=(row["memory_asked"] or 0.0) if shared else 0.0,
                least_gpus=max(1.0, math.ceil(gpus * least)) if resized else None,
                most_gpus=max(1.0, math.floor(gpus * most)) if resized else None,
                serial_share=serial if resized else 0.0,
            )
        )
        ended = row["end_s"] is not None and row["start_s"] is not None
        run_s.append(row["end_s"] - row["start_s"] if ended else 0.0)
        limits.append(row["limit_s"])
        if args.first is not None and len(asks) == args.first:
            break
    return asks, run_s, limits, left_out


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
        raise InputError([Problem("--elastic", what, "use LEAST:MOST, such as 0.5:2")])
    least, most = (parse_number(part, "--elastic") for part in parts)
    require(real("--elastic", least, 0.0, 1.0), real("--elastic", most, 1.0, 1e6))
    return least, most


def _estimates(
    how: str, asks: list[Ask], run_s: list[float], limits: list[float | None], where: str
) -> list[float]:
    if how == "predicted":
        return predicted(asks, run_s)
    if how == "exact":
        return run_s
    if all(limit is None for limit in limits):
        raise InputError([Problem(where, "no job has a limit", "use --estimate predicted")])
    return [math.inf if limit is None else limit for limit in limits]


def numbers(text: str | None, flag: str) -> dict[str, float]:
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
        require(real(flag, found[name.strip()], 0.0, 1e9))
    return found
