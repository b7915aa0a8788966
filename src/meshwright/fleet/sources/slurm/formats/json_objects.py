"""Slurm's JSON of both generations, as records, nodes and held GPUs.

Before 23.02 (`openapi/v0.0.38`) numbers are plain, states one word and exit codes wait statuses;
since (`data_parser/v0.0.40` and on) a number is `{"set", "infinite", "number"}` and a state a list.
Each value is read by what it is, whichever generation the file says it has.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from meshwright.fleet.sources.slurm.formats.tres import parse_gres_gpus

Object = Mapping[str, Any]
_FAR: Final = 1e15
"""Slurm's marks for no value are numbers near the ends of 32 and 64 bits."""


def parse_number(value: Any) -> float | None:
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


def get_object(value: Object, name: str) -> Object:
    """Return an object within an object, an empty one where there is none."""
    found = value.get(name)
    return found if isinstance(found, Mapping) else {}


def get_list(value: Object, name: str) -> list[Any]:
    """Return a list within an object, an empty one where there is none."""
    found = value.get(name)
    return found if isinstance(found, list) else []


def get_objects(value: Object, name: str) -> list[Object]:
    """Return the objects of a list within an object."""
    return [entry for entry in get_list(value, name) if isinstance(entry, Mapping)]


def parse_time(value: Any) -> float | None:
    """Return a time; nought is Slurm's word for none."""
    return parse_number(value) or None


def parse_text(value: Any) -> str | None:
    """Return text that says something."""
    return value if isinstance(value, str) and value not in {"", "(null)"} else None


def parse_state_words(value: Any) -> str:
    """Return a state with its flags as one text, whether it was a word or a list."""
    if isinstance(value, str):
        return value.upper()
    return "+".join(str(word).upper() for word in value) if isinstance(value, list) else ""


def find_cluster(document: Object) -> str:
    """Return the cluster a document says it comes from; old ones do not say."""
    meta = get_object(document, "meta")
    slurm = get_object(meta, "slurm") or get_object(meta, "Slurm")
    return parse_text(slurm.get("cluster")) or ""


def find_update_time(document: Object) -> float | None:
    """Return when the controller last changed what it tells, where it says so."""
    return parse_time(document.get("last_update"))


def is_accounting(job: Object) -> bool:
    """Say whether a job is one of the accounting's; the controller's have no such `time`."""
    return isinstance(job.get("time"), Mapping)


def parse_accounting_jobs(jobs: Sequence[Object]) -> Iterator[dict[str, Any]]:
    """Give the records of jobs of the accounting (`sacct --json`, `/slurmdb/…/jobs`) and steps."""
    for job in jobs:
        time, state = get_object(job, "time"), get_object(job, "state")
        tres = get_object(job, "tres")
        name = _job_id(job.get("job_id"), get_object(job, "array"), get_object(job, "het"))
        shared = {
            "cluster": parse_text(job.get("cluster")),
            "id": name,
            "scheduler_id": str(job.get("job_id")),
        }
        total = _seconds(time.get("total"))
        yield {
            **shared,
            "name": parse_text(job.get("name")),
            "user": parse_text(job.get("user"))
            or parse_text(get_object(job, "association").get("user")),
            "team": parse_text(job.get("account")),
            "partition": parse_text(job.get("partition")),
            "qos": parse_text(job.get("qos")),
            "state": parse_state_words(state.get("current")),
            "by": parse_text(job.get("kill_request_user")),
            "exit": _exit(job.get("exit_code"), parse_state_words(state.get("current"))),
            "reason": parse_text(state.get("reason")),
            "failed_node": parse_text(job.get("failed_node")),
            "submit_line": parse_text(job.get("submit_line")),
            "wckey": parse_text(get_object(job, "wckey").get("wckey"))
            or parse_text(job.get("wckey")),
            "alloc": _tres(tres, "allocated"),
            "req": _tres(tres, "requested"),
            "nodelist": _plain(job.get("nodes")),
            "num_nodes": parse_number(job.get("allocation_nodes")),
            "cpus": parse_number(get_object(job, "required").get("CPUs")),
            "submit_s": parse_time(time.get("submission")),
            "eligible_s": parse_time(time.get("eligible")),
            "start_s": parse_time(time.get("start")),
            "end_s": parse_time(time.get("end")),
            "elapsed_s": parse_number(time.get("elapsed")),
            "time_limit_s": _minutes(time.get("limit")),
            # The older generation leaves nought here and tells only the steps'.
            "cpu_s": total or None,
            "restarts": parse_number(job.get("restart_cnt")),
        }
        for step in get_objects(job, "steps"):
            yield {**shared, **_step(step)}


def _step(step: Object) -> dict[str, Any]:
    time, tres = get_object(step, "time"), get_object(step, "tres")
    usage = {
        (str(entry.get("type")), str(entry.get("name") or "")): parse_number(entry.get("count"))
        for entry in get_objects(get_object(tres, "requested"), "total")
    }
    name = get_object(step, "step").get("id")
    if isinstance(name, Mapping):
        name = name.get("step_id")
    return {
        "step": str(name).rpartition(".")[2],
        "state": parse_state_words(step.get("state")),
        "start_s": parse_time(time.get("start")),
        "end_s": parse_time(time.get("end")),
        "alloc": _tres(tres, "allocated"),
        "nodelist": _plain(get_object(step, "nodes").get("range")),
        "num_nodes": parse_number(get_object(step, "nodes").get("count")),
        "tasks": parse_number(get_object(step, "tasks").get("count")),
        "memory_total": usage.get(("mem", "")),
        "gpu_util_total": usage.get(("gres", "gpuutil")),
        "gpu_memory_total": usage.get(("gres", "gpumem")),
        "cpu_s": _seconds(time.get("total")),
    }


def parse_controller_jobs(jobs: Sequence[Object]) -> Iterator[dict[str, Any]]:
    """Give the records of jobs of the controller (`scontrol`, `squeue --json`, `/slurm/…/jobs`)."""
    for job in jobs:
        array = {
            "job_id": job.get("array_job_id"),
            "task_id": job.get("array_task_id"),
            "task": job.get("array_task_string"),
        }
        het = {"job_id": job.get("het_job_id"), "job_offset": job.get("het_job_offset")}
        state = parse_state_words(job.get("job_state"))
        yield {
            "cluster": parse_text(job.get("cluster")),
            "id": _job_id(job.get("job_id"), array, het),
            "scheduler_id": str(job.get("job_id")),
            "name": parse_text(job.get("name")),
            "user": parse_text(job.get("user_name")),
            "uid": str(job.get("user_id", "")),
            "team": parse_text(job.get("account")),
            "partition": parse_text(job.get("partition")),
            "qos": parse_text(job.get("qos")),
            "state": state,
            "exit": _exit(job.get("exit_code"), state),
            "reason": parse_text(job.get("state_reason")),
            "failed_node": parse_text(job.get("failed_node")),
            "wckey": parse_text(job.get("wckey")),
            "alloc": parse_text(job.get("tres_alloc_str")),
            "req": parse_text(job.get("tres_req_str")),
            "gpu_kind": _kind(job),
            "nodelist": _plain(job.get("nodes")),
            "num_nodes": parse_number(job.get("node_count")),
            "cpus": parse_number(job.get("cpus")),
            "submit_s": parse_time(job.get("submit_time")),
            "eligible_s": parse_time(job.get("eligible_time")),
            "start_s": parse_time(job.get("start_time")),
            "end_s": parse_time(job.get("end_time")),
            "time_limit_s": _minutes(job.get("time_limit")),
            "restarts": parse_number(job.get("restart_cnt")),
        }


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _kind(job: Object) -> str | None:
    """Return the type of GPU that a job has or asks for by name."""
    asks = (job.get(f"tres_per_{what}") for what in ("job", "node", "socket", "task"))
    for told in (*get_list(job, "gres_detail"), *asks):
        if isinstance(told, str):
            kind = parse_gres_gpus(told)[1]
            if kind:
                return kind
    return None


def _job_id(job: Any, array: Object, het: Object) -> str:
    """Name a job as people do, from its number and its place in an array or a group of jobs."""
    parent, task = parse_number(array.get("job_id")), parse_number(array.get("task_id"))
    if parent and task is not None:
        return f"{parent:.0f}_{task:.0f}"
    if parent and parse_text(array.get("task")):
        return f"{parent:.0f}_[{str(array['task']).strip('[]')}]"
    group = parse_number(het.get("job_id"))
    if group:
        return f"{group:.0f}+{parse_number(het.get('job_offset')) or 0:.0f}"
    return str(job)


def _exit(value: Any, state: str) -> str | None:
    """Return `code:signal` from a wait status or an object of either generation."""
    status = parse_number(value) if not isinstance(value, Mapping) or "number" in value else None
    if status is not None:
        return f"{int(status) >> 8 & 0xFF}:{int(status) & 0x7F}"
    if not isinstance(value, Mapping):
        return None
    signal = get_object(value, "signal")
    number_of = parse_number(signal.get("id", signal.get("signal_id")))
    code = parse_number(value.get("return_code"))
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
    for entry in get_objects(tres, name):
        count = parse_number(entry.get("count"))
        if count is None:
            continue
        kind, which = entry.get("type"), entry.get("name")
        key = f"{kind}/{which}" if which else f"{kind}"
        parts.append(f"{key}={count:.0f}{'M' if key == 'mem' else ''}")
    return ",".join(parts)


def _minutes(value: Any) -> float | None:
    minutes = parse_number(value)
    return None if minutes is None else minutes * 60.0


def _seconds(value: Any) -> float | None:
    if not isinstance(value, Mapping):
        return parse_number(value)
    return (parse_number(value.get("seconds")) or 0.0) + (
        parse_number(value.get("microseconds")) or 0.0
    ) / 1e6
