"""Which GPUs are whose: from the controller while jobs run, and from a log that prologs keep.

Accounting has no indexes of GPUs, and the controller forgets them when a job ends. The log has a
line for each start and end on each node, as `hooks/prolog.sh` and `hooks/epilog.sh` write them:

    1794705625 prolog job=7 node=n4 gpus=1,2 restarts=0
    1794705628 epilog job=7 node=n4 gpus=1,2
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from meshwright.fleet.sources.slurm.formats.hostlist import expand_hostlist, expand_indexes
from meshwright.fleet.sources.slurm.formats.tres import parse_gpu_fraction, parse_gres
from meshwright.fleet.sources.source import make_rows

_LINE = re.compile(r"^(\d+(?:\.\d+)?) (prolog|epilog) (.*\bjob=\d+.*)$")


class SlurmAllocation(NamedTuple):
    """A job's GPUs of one node."""

    cluster: str
    job: str
    attempt: int
    node: str
    gpu_fractions: Mapping[int, float]
    """Indexes, and which share of each."""
    start_s: float | None
    end_s: float | None


def build_allocation_rows(
    holds: Sequence[SlurmAllocation], seen_s: float, renames: Mapping[str, str] = {}
) -> pa.Table:
    """Return rows of the table of held GPUs."""
    flat = [(hold, gpu, share) for hold in holds for gpu, share in hold.gpu_fractions.items()]
    return make_rows(
        "allocations",
        {
            "cluster": pa.array([hold.cluster for hold, _, _ in flat], pa.string()),
            "job": pa.array([hold.job for hold, _, _ in flat], pa.string()),
            "attempt": pa.array([hold.attempt for hold, _, _ in flat], pa.int32()),
            "node": pa.array(
                [renames.get(hold.node, hold.node) for hold, _, _ in flat], pa.string()
            ),
            "gpu": pa.array([gpu for _, gpu, _ in flat], pa.int32()),
            "start_s": pa.array([hold.start_s for hold, _, _ in flat], pa.float64()),
            "end_s": pa.array([hold.end_s for hold, _, _ in flat], pa.float64()),
            "gpu_fraction": pa.array([share for _, _, share in flat], pa.float64()),
            "seen_s": pa.array(np.full(len(flat), seen_s)),
        },
    )


def parse_gres_detail(gres: str) -> dict[int, float]:
    """Return the GPUs that `gpu:a100:2(IDX:0-1)` or `shard:2(2/4,0/4)` names, with shares."""
    held: dict[int, float] = {}
    for entry in parse_gres(gres):
        if entry.name == "gpu" and entry.detail.startswith("IDX:"):
            held |= dict.fromkeys(expand_indexes(entry.detail[4:]), parse_gpu_fraction(entry.kind))
        elif entry.name == "shard":
            for gpu, (part, whole) in enumerate(re.findall(r"(\d+)/(\d+)", entry.detail)):
                if int(part) and int(whole):
                    held[gpu] = int(part) / int(whole)
    return held


def assign_to_nodes(nodes: str, gres: str) -> Iterator[tuple[str, dict[int, float]]]:
    """Give each of several nodes that are told together with the GPUs of each."""
    gpus = parse_gres_detail(gres)
    if gpus:
        for node in expand_hostlist(nodes):
            yield node, gpus


def read_prolog_log(lines: Iterator[str], cluster: str) -> list[SlurmAllocation]:
    """Read the log of prologs and epilogs; `job` is the scheduler's number of it.

    An epilog ends the start before it of the same job on the same node. It does not know the
    attempt: Slurm has counted the restart already when it runs.
    """
    told = sorted((entry for line in lines if (entry := _entry(line))), key=lambda entry: entry[0])
    open_ones: dict[tuple[str, str], SlurmAllocation] = {}
    seen: dict[tuple[str, str], int] = {}
    done: list[SlurmAllocation] = []
    for time, what, values in told:
        key = (values["job"], values.get("node", ""))
        before = open_ones.pop(key, None)
        if before is not None:
            # A prolog over an open start means that an epilog never ran: the node went down.
            done.append(before._replace(end_s=time))
        if what == "prolog":
            count = seen.get(key, -1) + 1
            attempt = int(values["restarts"]) if values.get("restarts", "").isdigit() else count
            seen[key] = attempt
            gpus = dict.fromkeys(expand_indexes(values.get("gpus", "")), 1.0)
            name = values.get("cluster", cluster)
            open_ones[key] = SlurmAllocation(name, key[0], attempt, key[1], gpus, time, None)
    return [*done, *open_ones.values()]


def _entry(line: str) -> tuple[float, str, dict[str, str]] | None:
    found = _LINE.match(line.strip())
    if not found:
        return None
    values: dict[str, Any] = dict(part.split("=", 1) for part in found[3].split() if "=" in part)
    return (float(found[1]), found[2], values) if "job" in values else None
