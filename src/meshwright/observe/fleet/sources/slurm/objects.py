"""Slurm's JSON of both generations, as records, nodes and held GPUs.

Before 23.02 (`openapi/v0.0.38`) numbers are plain, states one word and exit codes wait statuses;
since (`data_parser/v0.0.40` and on) a number is `{"set", "infinite", "number"}` and a state a list.
Each value is read by what it is, whichever generation the file says it has.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from meshwright.observe.fleet.sources.slurm.tres import gpus_of_gres

Object = Mapping[str, Any]
_FAR: Final = 1e15
"""Slurm's marks for no value are numbers near the ends of 32 and 64 bits."""


def number(value: Any) -> float | None:
    """Return a number of either generation; None where it is not set or has no end."""
    if isinstance(value, Mapping):
        if not value.get("set") or value.get("infinite"):
            return None
        value = value.get("number")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    # NO_VAL and INFINITE of 32 bits, their kin of 64 bits and negative ones.
    if value < 0 or value >= _FAR or 0xFFFFFFF0 <= value <= 0xFFFFFFFF:
        return None
    return float(value)


def inner(value: Object, name: str) -> Object:
    """Return an object within an object, an empty one where there is none."""
    found = value.get(name)
    return found if isinstance(found, Mapping) else {}


def entries(value: Object, name: str) -> list[Any]:
    """Return a list within an object, an empty one where there is none."""
    found = value.get(name)
    return found if isinstance(found, list) else []


def listed(value: Object, name: str) -> list[Object]:
    """Return the objects of a list within an object."""
    return [entry for entry in entries(value, name) if isinstance(entry, Mapping)]


def moment(value: Any) -> float | None:
    """Return a time; nought is Slurm's word for none."""
    return number(value) or None


def text(value: Any) -> str | None:
    """Return text that says something."""
    return value if isinstance(value, str) and value not in {"", "(null)"} else None


def words(value: Any) -> str:
    """Return a state with its flags as one text, whether it was a word or a list."""
    if isinstance(value, str):
        return value.upper()
    return "+".join(str(word).upper() for word in value) if isinstance(value, list) else ""


def cluster_of(document: Object) -> str:
    """Return the cluster a document says it comes from; old ones do not say."""
    meta = inner(document, "meta")
    slurm = inner(meta, "slurm") or inner(meta, "Slurm")
    return text(slurm.get("cluster")) or ""


def told_at(document: Object) -> float | None:
    """Return when the controller last changed what it tells, where it says so."""
    return moment(document.get("last_update"))


def is_accounting(job: Object) -> bool:
    """Say whether a job is one of the accounting's; the controller's have no such `time`."""
    return isinstance(job.get("time"), Mapping)


def accounted(jobs: Sequence[Object]) -> Iterator[dict[str, Any]]:
    """Give the records of jobs of the accounting (`sacct --json`, `/slurmdb/…/jobs`) and steps."""
    for job in jobs:
        time, state = inner(job, "time"), inner(job, "state")
        tres = inner(job, "tres")
        name = _job_id(job.get("job_id"), inner(job, "array"), inner(job, "het"))
        shared = {"cluster": text(job.get("cluster")), "id": name, "number": str(job.get("job_id"))}
        total = _seconds(time.get("total"))
        yield {
            **shared,
            "name": text(job.get("name")),
            "user": text(job.get("user")) or text(inner(job, "association").get("user")),
            "team": text(job.get("account")),
            "partition": text(job.get("partition")),
            "qos": text(job.get("qos")),
            "state": words(state.get("current")),
            "by": text(job.get("kill_request_user")),
            "exit": _exit(job.get("exit_code"), words(state.get("current"))),
            "reason": text(state.get("reason")),
            "failed_node": text(job.get("failed_node")),
            "submit_line": text(job.get("submit_line")),
            "wckey": text(inner(job, "wckey").get("wckey")) or text(job.get("wckey")),
            "alloc": _tres(tres, "allocated"),
            "req": _tres(tres, "requested"),
            "nodelist": _plain(job.get("nodes")),
            "num_nodes": number(job.get("allocation_nodes")),
            "cpus": number(inner(job, "required").get("CPUs")),
            "submit_s": moment(time.get("submission")),
            "eligible_s": moment(time.get("eligible")),
            "start_s": moment(time.get("start")),
            "end_s": moment(time.get("end")),
            "elapsed_s": number(time.get("elapsed")),
            "limit_s": _minutes(time.get("limit")),
            # The older generation leaves nought here and tells only the steps'.
            "cpu_s": total or None,
            "restarts": number(job.get("restart_cnt")),
        }
        for step in listed(job, "steps"):
            yield {**shared, **_step(step)}


def _step(step: Object) -> dict[str, Any]:
    time, tres = inner(step, "time"), inner(step, "tres")
    usage = {
        (str(entry.get("type")), str(entry.get("name") or "")): number(entry.get("count"))
        for entry in listed(inner(tres, "requested"), "total")
    }
    name = inner(step, "step").get("id")
    if isinstance(name, Mapping):
        name = name.get("step_id")
    return {
        "step": str(name).rpartition(".")[2],
        "state": words(step.get("state")),
        "start_s": moment(time.get("start")),
        "end_s": moment(time.get("end")),
        "alloc": _tres(tres, "allocated"),
        "nodelist": _plain(inner(step, "nodes").get("range")),
        "num_nodes": number(inner(step, "nodes").get("count")),
        "tasks": number(inner(step, "tasks").get("count")),
        "memory_total": usage.get(("mem", "")),
        "gpu_util_total": usage.get(("gres", "gpuutil")),
        "gpu_memory_total": usage.get(("gres", "gpumem")),
        "cpu_s": _seconds(time.get("total")),
    }


def controlled(jobs: Sequence[Object]) -> Iterator[dict[str, Any]]:
    """Give the records of jobs of the controller (`scontrol`, `squeue --json`, `/slurm/…/jobs`)."""
    for job in jobs:
        array = {
            "job_id": job.get("array_job_id"),
            "task_id": job.get("array_task_id"),
            "task": job.get("array_task_string"),
        }
        het = {"job_id": job.get("het_job_id"), "job_offset": job.get("het_job_offset")}
        state = words(job.get("job_state"))
        yield {
            "cluster": text(job.get("cluster")),
            "id": _job_id(job.get("job_id"), array, het),
            "number": str(job.get("job_id")),
            "name": text(job.get("name")),
            "user": text(job.get("user_name")),
            "uid": str(job.get("user_id", "")),
            "team": text(job.get("account")),
            "partition": text(job.get("partition")),
            "qos": text(job.get("qos")),
            "state": state,
            "exit": _exit(job.get("exit_code"), state),
            "reason": text(job.get("state_reason")),
            "failed_node": text(job.get("failed_node")),
            "wckey": text(job.get("wckey")),
            "alloc": text(job.get("tres_alloc_str")),
            "req": text(job.get("tres_req_str")),
            "gpu_kind": _kind(job),
            "nodelist": _plain(job.get("nodes")),
            "num_nodes": number(job.get("node_count")),
            "cpus": number(job.get("cpus")),
            "submit_s": moment(job.get("submit_time")),
            "eligible_s": moment(job.get("eligible_time")),
            "start_s": moment(job.get("start_time")),
            "end_s": moment(job.get("end_time")),
            "limit_s": _minutes(job.get("time_limit")),
            "restarts": number(job.get("restart_cnt")),
        }


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _kind(job: Object) -> str | None:
    """Return the type of GPU that a job has or asks for by name."""
    asks = (job.get(f"tres_per_{what}") for what in ("job", "node", "socket", "task"))
    for told in (*entries(job, "gres_detail"), *asks):
        if isinstance(told, str):
            kind = gpus_of_gres(told)[1]
            if kind:
                return kind
    return None


def _job_id(job: Any, array: Object, het: Object) -> str:
    """Name a job as people do, from its number and its place in an array or a group of jobs."""
    parent, task = number(array.get("job_id")), number(array.get("task_id"))
    if parent and task is not None:
        return f"{parent:.0f}_{task:.0f}"
    if parent and text(array.get("task")):
        return f"{parent:.0f}_[{str(array['task']).strip('[]')}]"
    group = number(het.get("job_id"))
    if group:
        return f"{group:.0f}+{number(het.get('job_offset')) or 0:.0f}"
    return str(job)


def _exit(value: Any, state: str) -> str | None:
    """Return `code:signal` from a wait status or an object of either generation."""
    status = number(value) if not isinstance(value, Mapping) or "number" in value else None
    if status is not None:
        return f"{int(status) >> 8 & 0xFF}:{int(status) & 0x7F}"
    if not isinstance(value, Mapping):
        return None
    signal = inner(value, "signal")
    number_of = number(signal.get("id", signal.get("signal_id")))
    code = number(value.get("return_code"))
    if (
        not code
        and not number_of
        and state.startswith("FAILED")
        and isinstance(value.get("status"), str)
    ):
        return None  # 22.05 writes SUCCESS for every code that is not a signal's
    return f"{code or 0:.0f}:{number_of or 0:.0f}"


def _tres(tres: Object, name: str) -> str:
    """Write a list of resources as Slurm's text does; memory is counted in MiB."""
    parts = []
    for entry in listed(tres, name):
        count = number(entry.get("count"))
        if count is None:
            continue
        kind, which = entry.get("type"), entry.get("name")
        key = f"{kind}/{which}" if which else f"{kind}"
        parts.append(f"{key}={count:.0f}{'M' if key == 'mem' else ''}")
    return ",".join(parts)


def _minutes(value: Any) -> float | None:
    minutes = number(value)
    return None if minutes is None else minutes * 60.0


def _seconds(value: Any) -> float | None:
    if not isinstance(value, Mapping):
        return number(value)
    return (number(value.get("seconds")) or 0.0) + (number(value.get("microseconds")) or 0.0) / 1e6
