"""Lists of jobs: Acme, Helios, copies of Philly, and the workloads of simulators made from them."""

import numpy as np
import pyarrow as pa

from meshwright.observe.fleet.sources.public.columns import GIB, number, seconds, state, text
from meshwright.observe.fleet.sources.public.form import Form, Tables, Told, form, jobs
from meshwright.observe.fleet.tables import WAIT_NOT_TOLD

CHINA = "Asia/Shanghai"
"""Helios writes local time without a zone."""
PACIFIC = "America/Los_Angeles"
"""Philly's samples say PDT and PST; its jobs say nothing, and lie on the same clock."""


def _slurm_like(block: pa.Table, told: Told) -> Tables:
    """Read jobs of Acme and of Helios, whose columns have the same names."""
    memory = number(block, "mem_per_pod_GB", GIB) * number(block, "node_num")
    return jobs(
        block,
        told,
        job=text(block, "job_id"),
        user=text(block, "user"),
        partition=text(block, "vc"),
        team=text(block, "vc"),
        work=text(block, "type"),
        state=state(block, "state"),
        submit_s=seconds(block, "submit_time", CHINA),
        start_s=seconds(block, "start_time", CHINA),
        end_s=seconds(block, "end_time", CHINA),
        gpus=number(block, "gpu_num"),
        cpus=number(block, "cpu_num"),
        num_nodes=pa.array(number(block, "node_num"), from_pandas=True).cast(pa.int32()),
        memory_asked=memory,
    )


def _named_by_row(block: pa.Table, told: Told) -> pa.Array:
    rows = range(told.first_row, told.first_row + block.num_rows)
    return pa.array([str(row) for row in rows], pa.string())


def _philly_durations(block: pa.Table, told: Told) -> Tables:
    submit = seconds(block, "timestamp", PACIFIC)
    return jobs(
        block,
        told,
        job=_named_by_row(block, told),
        partition=text(block, "cluster"),
        team=text(block, "cluster"),
        submit_s=submit,
        start_s=submit,
        end_s=submit + number(block, "duration"),
        gpus=number(block, "num_gpus"),
        reason=[WAIT_NOT_TOLD] * block.num_rows,
        state=["unknown"] * block.num_rows,
    )


def _simulated(block: pa.Table, told: Told, scale: float) -> Tables:
    """Read a simulator's workload: when jobs come, how long they run, on how many GPUs."""
    submit = number(block, "submit_time", scale)
    return jobs(
        block,
        told,
        job=text(block, "job_id"),
        user=text(block, "user"),
        work=text(block, "model_name"),
        qos=text(block, "job_type"),
        submit_s=submit,
        start_s=submit,
        end_s=submit + number(block, "duration", scale),
        gpus=number(block, "num_gpu"),
        reason=[WAIT_NOT_TOLD] * block.num_rows,
        state=["unknown"] * block.num_rows,
    )


def _muri(block: pa.Table, told: Told) -> Tables:
    return _simulated(block, told, 1e-3)


def _chronus(block: pa.Table, told: Told) -> Tables:
    return _simulated(block, told, 1.0)


def _muri_run(block: pa.Table, told: Told) -> Tables:
    """Read jobs that ran on a real cluster; policies stop and resume them in between."""
    return jobs(
        block,
        told,
        job=text(block, "job_id"),
        submit_s=number(block, "submit_time"),
        start_s=number(block, "start_time"),
        end_s=number(block, "end_time"),
        gpus=number(block, "num_gpu"),
        state=["completed"] * block.num_rows,
    )


def _sia(block: pa.Table, told: Told) -> Tables:
    """Read when jobs come; how long they take is up to Sia's models of them."""
    return jobs(
        block,
        told,
        job=text(block, "name"),
        work=text(block, "application"),
        submit_s=number(block, "time"),
        gpus=number(block, "num_replicas"),
        state=["unknown"] * block.num_rows,
    )


def _spot(block: pa.Table, told: Told) -> Tables:
    submit, workers = number(block, "submit_time"), number(block, "worker_num")
    return jobs(
        block,
        told,
        job=text(block, "job_name"),
        team=text(block, "organization"),
        qos=text(block, "job_type"),
        gpu_kind=text(block, "gpu_model"),
        submit_s=submit,
        start_s=submit,
        end_s=submit + number(block, "duration"),
        gpus=number(block, "gpu_request") * workers,
        cpus=number(block, "cpu_request") * workers,
        num_nodes=pa.array(np.where(workers > 0, workers, np.nan), from_pandas=True),
        reason=[WAIT_NOT_TOLD] * block.num_rows,
        state=["unknown"] * block.num_rows,
    )


_JOB = "job_id, user, gpu_num, cpu_num, state, submit_time, start_time, end_time"
FORMS: tuple[Form, ...] = (
    form("Acme jobs of Kalos", f"{_JOB}, type, mem_per_pod_GB", _slurm_like, "Kalos"),
    form("Acme jobs", f"{_JOB}, type", _slurm_like, "Seren", without="mem_per_pod_GB, vc"),
    form("Helios jobs", f"{_JOB}, vc", _slurm_like),
    form("jobs", "job_id, gpu_num, state, submit_time, start_time, end_time", _slurm_like),
    form(
        "Philly jobs by duration",
        "timestamp, duration, num_gpus, gpu_time, cluster",
        _philly_durations,
        "Philly",
    ),
    form(
        "Muri workload",
        "job_id, num_gpu, submit_time, iterations, duration, iteration_time, resource_time_0",
        _muri,
    ),
    form("Muri run", "job_id, num_gpu, submit_time, start_time, end_time, JCT", _muri_run),
    form("Chronus workload", "job_id, num_gpu, submit_time, duration, expect_time_list", _chronus),
    form("Sia workload", "name, time, application, num_replicas, batch_size", _sia),
    form(
        "Alibaba 2026 spot jobs",
        "job_name, organization, gpu_model, gpu_request, worker_num, submit_time, duration",
        _spot,
    ),
)
