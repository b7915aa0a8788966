"""Lists of jobs: Acme, Helios, copies of Philly, and the workloads of simulators made from them."""

import numpy as np
import pyarrow as pa

from meshwright.fleet.sources.public_traces.columns import (
    GIB,
    read_numbers,
    read_states,
    read_text,
    read_times,
)
from meshwright.fleet.sources.public_traces.trace_format import (
    ReadContext,
    RowsByTable,
    TraceFormat,
    define_format,
    make_job_rows,
)
from meshwright.fleet.tables import UNKNOWN_WAIT

CHINA_TIME_ZONE = "Asia/Shanghai"
"""Helios writes local time without a zone."""
PACIFIC_TIME_ZONE = "America/Los_Angeles"
"""Philly's samples say PDT and PST; its jobs say nothing, and lie on the same clock."""


def _slurm_like(block: pa.Table, told: ReadContext) -> RowsByTable:
    """Read jobs of Acme and of Helios, whose columns have the same names."""
    memory = read_numbers(block, "mem_per_pod_GB", GIB) * read_numbers(block, "node_num")
    return make_job_rows(
        block,
        told,
        job=read_text(block, "job_id"),
        user=read_text(block, "user"),
        partition=read_text(block, "vc"),
        team=read_text(block, "vc"),
        workload=read_text(block, "type"),
        state=read_states(block, "state"),
        submit_s=read_times(block, "submit_time", CHINA_TIME_ZONE),
        start_s=read_times(block, "start_time", CHINA_TIME_ZONE),
        end_s=read_times(block, "end_time", CHINA_TIME_ZONE),
        gpus=read_numbers(block, "gpu_num"),
        cpus=read_numbers(block, "cpu_num"),
        num_nodes=pa.array(read_numbers(block, "node_num"), from_pandas=True).cast(pa.int32()),
        memory_requested=memory,
    )


def _named_by_row(block: pa.Table, told: ReadContext) -> pa.Array:
    rows = range(told.first_row, told.first_row + block.num_rows)
    return pa.array([str(row) for row in rows], pa.string())


def _philly_durations(block: pa.Table, told: ReadContext) -> RowsByTable:
    submit = read_times(block, "timestamp", PACIFIC_TIME_ZONE)
    return make_job_rows(
        block,
        told,
        job=_named_by_row(block, told),
        partition=read_text(block, "cluster"),
        team=read_text(block, "cluster"),
        submit_s=submit,
        start_s=submit,
        end_s=submit + read_numbers(block, "duration"),
        gpus=read_numbers(block, "num_gpus"),
        reason=[UNKNOWN_WAIT] * block.num_rows,
        state=["unknown"] * block.num_rows,
    )


def _simulated(block: pa.Table, told: ReadContext, scale: float) -> RowsByTable:
    """Read a simulator's workload: when jobs come, how long they run, on how many GPUs."""
    submit = read_numbers(block, "submit_time", scale)
    return make_job_rows(
        block,
        told,
        job=read_text(block, "job_id"),
        user=read_text(block, "user"),
        workload=read_text(block, "model_name"),
        qos=read_text(block, "job_type"),
        submit_s=submit,
        start_s=submit,
        end_s=submit + read_numbers(block, "duration", scale),
        gpus=read_numbers(block, "num_gpu"),
        reason=[UNKNOWN_WAIT] * block.num_rows,
        state=["unknown"] * block.num_rows,
    )


def _muri(block: pa.Table, told: ReadContext) -> RowsByTable:
    return _simulated(block, told, 1e-3)


def _chronus(block: pa.Table, told: ReadContext) -> RowsByTable:
    return _simulated(block, told, 1.0)


def _muri_run(block: pa.Table, told: ReadContext) -> RowsByTable:
    """Read jobs that ran on a real cluster; policies stop and resume them in between."""
    return make_job_rows(
        block,
        told,
        job=read_text(block, "job_id"),
        submit_s=read_numbers(block, "submit_time"),
        start_s=read_numbers(block, "start_time"),
        end_s=read_numbers(block, "end_time"),
        gpus=read_numbers(block, "num_gpu"),
        state=["completed"] * block.num_rows,
    )


def _sia(block: pa.Table, told: ReadContext) -> RowsByTable:
    """Read when jobs come; how long they take is up to Sia's models of them."""
    return make_job_rows(
        block,
        told,
        job=read_text(block, "name"),
        workload=read_text(block, "application"),
        submit_s=read_numbers(block, "time"),
        gpus=read_numbers(block, "num_replicas"),
        state=["unknown"] * block.num_rows,
    )


def _spot(block: pa.Table, told: ReadContext) -> RowsByTable:
    submit, workers = read_numbers(block, "submit_time"), read_numbers(block, "worker_num")
    return make_job_rows(
        block,
        told,
        job=read_text(block, "job_name"),
        team=read_text(block, "organization"),
        qos=read_text(block, "job_type"),
        gpu_kind=read_text(block, "gpu_model"),
        submit_s=submit,
        start_s=submit,
        end_s=submit + read_numbers(block, "duration"),
        gpus=read_numbers(block, "gpu_request") * workers,
        cpus=read_numbers(block, "cpu_request") * workers,
        num_nodes=pa.array(np.where(workers > 0, workers, np.nan), from_pandas=True),
        reason=[UNKNOWN_WAIT] * block.num_rows,
        state=["unknown"] * block.num_rows,
    )


_JOB = "job_id, user, gpu_num, cpu_num, state, submit_time, start_time, end_time"
TRACE_FORMATS: tuple[TraceFormat, ...] = (
    define_format("Acme jobs of Kalos", f"{_JOB}, type, mem_per_pod_GB", _slurm_like, "Kalos"),
    define_format("Acme jobs", f"{_JOB}, type", _slurm_like, "Seren", without="mem_per_pod_GB, vc"),
    define_format("Helios jobs", f"{_JOB}, vc", _slurm_like),
    define_format("jobs", "job_id, gpu_num, state, submit_time, start_time, end_time", _slurm_like),
    define_format(
        "Philly jobs by duration",
        "timestamp, duration, num_gpus, gpu_time, cluster",
        _philly_durations,
        "Philly",
    ),
    define_format(
        "Muri workload",
        "job_id, num_gpu, submit_time, iterations, duration, iteration_time, resource_time_0",
        _muri,
    ),
    define_format("Muri run", "job_id, num_gpu, submit_time, start_time, end_time, JCT", _muri_run),
    define_format(
        "Chronus workload", "job_id, num_gpu, submit_time, duration, expect_time_list", _chronus
    ),
    define_format("Sia workload", "name, time, application, num_replicas, batch_size", _sia),
    define_format(
        "Alibaba 2026 spot jobs",
        "job_name, organization, gpu_model, gpu_request, worker_num, submit_time, duration",
        _spot,
    ),
)
