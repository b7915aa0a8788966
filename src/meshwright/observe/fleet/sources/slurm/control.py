"""What the controller tells of jobs in text (`scontrol show job`), as records."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from meshwright.observe.fleet.sources.slurm.clock import Moments, settle
from meshwright.observe.fleet.sources.slurm.columns import floats, nullable
from meshwright.observe.fleet.sources.slurm.hostlist import names_of
from meshwright.observe.fleet.sources.slurm.records import records_from
from meshwright.observe.fleet.sources.slurm.states import job_state
from meshwright.observe.fleet.sources.slurm.tres import gpus_of_gres, span_s

Block = Mapping[str, Any]
_USER = re.compile(r"(.*)\((\d+)\)")


def job_records(blocks: Sequence[Block], zone: str) -> pa.Table:
    """Return the records of the blocks that are jobs."""
    jobs = [block for block in blocks if "JobId" in block]
    table = records_from(_record(job) for job in jobs)
    times = ("SubmitTime", "EligibleTime", "StartTime", "EndTime")
    told = [
        Moments(pa.array([job.get(name, "") for job in jobs], pa.string()), zone) for name in times
    ]
    submit, eligible, start, end = told
    settled = settle(submit, eligible, start, end, floats(table["elapsed_s"]))
    for name, values in zip(("submit_s", "eligible_s", "start_s", "end_s"), settled, strict=True):
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(name), nullable(values))
    return table


def job_name(job: Block) -> str:
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
    waits = job_state(state) == "pending" or not names_of(job.get("NodeList", ""))
    given = job.get("AllocTRES", "" if waits else job.get("TRES", ""))
    asked = job.get("ReqTRES", job.get("TRES", ""))
    kinds = (
        gpus_of_gres(job.get(name, ""))[1]
        for name in ("JOB_GRES", "TresPerJob", "TresPerNode", "TresPerTask")
    )
    return {
        "id": job_name(job),
        "number": str(job["JobId"]),
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
        "elapsed_s": span_s(job.get("RunTime", "")),
        "limit_s": span_s(job.get("TimeLimit", "")),
        "restarts": _count(job.get("Restarts", "")),
    }


def _told(job: Block, name: str) -> str | None:
    value = job.get(name)
    return None if value in {None, "", "(null)", "N/A"} else str(value)


def _count(value: str) -> float | None:
    """Read a count, of `1-4` the least."""
    found = re.match(r"\d+", value)
    return float(found[0]) if found else None
