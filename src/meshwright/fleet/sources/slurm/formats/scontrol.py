"""What the controller tells of jobs in text (`scontrol show job`), as records."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from meshwright.fleet.sources.slurm.formats.hostlist import expand_hostlist
from meshwright.fleet.sources.slurm.formats.local_time import LocalTimes, resolve_dst
from meshwright.fleet.sources.slurm.formats.states import parse_job_state
from meshwright.fleet.sources.slurm.formats.text_columns import to_arrow, to_floats
from meshwright.fleet.sources.slurm.formats.tres import parse_duration_s, parse_gres_gpus
from meshwright.fleet.sources.slurm.job_records import make_records_from_rows

Block = Mapping[str, Any]

_USER = re.compile(r"(.*)\((\d+)\)")


def parse_job_records(blocks: Sequence[Block], zone: str) -> pa.Table:
    """Return the records of the blocks that are jobs."""
    jobs = [block for block in blocks if "JobId" in block]
    table = make_records_from_rows(_record(job) for job in jobs)
    times = ("SubmitTime", "EligibleTime", "StartTime", "EndTime")
    told = [
        LocalTimes(pa.array([job.get(name, "") for job in jobs], pa.string()), zone)
        for name in times
    ]
    submit, eligible, start, end = told
    settled = resolve_dst(submit, eligible, start, end, to_floats(table["elapsed_s"]))
    for name, values in zip(("submit_s", "eligible_s", "start_s", "end_s"), settled, strict=True):
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(name), to_arrow(values))
    return table


def format_job_id(job: Block) -> str:
    """Name a job as people do."""
    if job.get("ArrayTaskId"):
        task = str(job["ArrayTaskId"])
        return f"{job['ArrayJobId']}_{task if task.isdigit() else f'[{task}]'}"
    if job.get("HetJobOffset"):
        return f"{job['HetJobId']}+{job['HetJobOffset']}"
    return str(job["JobId"])


def _record(job: Block) -> dict[str, Any]:
    user = _USER.fullmatch(job.get("UserId", ""))
    state = job.get("JobState", "")
    # Before 23.02 one list stood for both what is asked for and what is given.
    waits = parse_job_state(state) == "pending" or not expand_hostlist(job.get("NodeList", ""))
    given = job.get("AllocTRES", "" if waits else job.get("TRES", ""))
    asked = job.get("ReqTRES", job.get("TRES", ""))
    kinds = (
        parse_gres_gpus(job.get(name, ""))[1]
        for name in ("JOB_GRES", "TresPerJob", "TresPerNode", "TresPerTask")
    )
    return {
        "id": format_job_id(job),
        "scheduler_id": str(job["JobId"]),
        "name": _told(job, "JobName"),
        "user": user[1] if user else None,
        "uid": user[2] if user else None,
        "team": _told(job, "Account"),
        "partition": _told(job, "Partition"),
        "qos": _told(job, "QOS"),
        "state": state,
        "exit": _told(job, "ExitCode"),
        "reason": _told(job, "Reason"),
        "failed_node": _told(job, "FailedNode"),
        "wckey": _told(job, "WCKey"),
        "alloc": "" if given == "(null)" else given,
        "req": "" if asked == "(null)" else asked,
        "gpu_kind": next((kind for kind in kinds if kind), None),
        "nodelist": job.get("NodeList", ""),
        "num_nodes": _count(job.get("NumNodes", "")),
        "cpus": _count(job.get("NumCPUs", "")),
        "elapsed_s": parse_duration_s(job.get("RunTime", "")),
        "time_limit_s": parse_duration_s(job.get("TimeLimit", "")),
        "restarts": _count(job.get("Restarts", "")),
    }


def _told(job: Block, name: str) -> str | None:
    value = job.get(name)
    return None if value in {None, "", "(null)", "N/A"} else str(value)


def _count(value: str) -> float | None:
    """Read a count, of `1-4` the least."""
    found = re.match(r"\d+", value)
    return float(found[0]) if found else None


_KEY = re.compile(r"(?:^|\s)([A-Za-z][\w/:.\-]*)=")

_NAMES: Final = frozenset({"JobId", "NodeName"})

_TO_THE_END: Final = frozenset(
    {"Command", "WorkDir", "StdErr", "StdIn", "StdOut", "Comment", "AdminComment", "SystemComment",
     "Reason", "OS", "Extra", "SubmitLine"}
)  # fmt: skip
"""Values that may hold blanks and `=`: at the head of a line they go to its end."""


def iter_blocks(text: str) -> Iterator[dict[str, Any]]:
    """Give every job or node with its values; `gres` lists where its GPUs are, as (nodes, gres)."""
    block: dict[str, Any] = {}
    for line in text.splitlines():
        for key, value in _pairs(line):
            if key in _NAMES and block:
                yield block
                block = {}
            if key == "Nodes" and block:
                block.setdefault("gres", []).append([value, ""])
            elif key == "GRES" and block.get("gres"):
                block["gres"][-1][1] = value
            elif key not in block:
                block[key] = value
    if block:
        yield block


def _pairs(line: str) -> Iterator[tuple[str, str]]:
    found = list(_KEY.finditer(line))
    one_line = bool(found) and found[0][1] in _NAMES and len(found) > 12  # scontrol -o
    place = 0
    while place < len(found):
        match = found[place]
        end = found[place + 1].start() if place + 1 < len(found) else len(line)
        if not one_line and (match[1] == "JobName" or (match[1] in _TO_THE_END and not place)):
            end, place = len(line), len(found)
        # A list of resources is a value that holds `=` itself: TRES=cpu=8,mem=2000M
        yield match[1], line[match.end() : end].strip()
        place += 1
