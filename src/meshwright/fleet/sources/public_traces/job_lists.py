"""Lists of jobs: Acme, Helios, copies of Philly, and the workloads of simulators made from them."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.fleet.columns import Floats
from meshwright.fleet.sources.public_traces.columns import (
    GIB,
    read_numbers,
    read_states,
    read_text,
    read_times,
    to_counts,
)
from meshwright.fleet.sources.public_traces.trace_block import TraceBlock
from meshwright.fleet.sources.public_traces.trace_format import (
    ReadContext,
    RowsByTable,
    TraceFormat,
    define_format,
    make_job_rows,
    name_jobs_by_row,
)
from meshwright.fleet.tables import UNKNOWN_WAIT

CHINA_TIME_ZONE = "Asia/Shanghai"
"""Helios writes local time without a zone."""
_MINUTE_S, _SECOND_MS = 60.0, 1000.0
PACIFIC_TIME_ZONE = "America/Los_Angeles"
"""Philly's samples say PDT and PST; its jobs say nothing, and lie on the same clock."""


_CHINA = "the clock of Helios and Acme"
_PACIFIC = "the clock of Philly"


def _china_jobs(block: TraceBlock, told: ReadContext) -> RowsByTable:
    """Read jobs of Acme and of Helios, whose columns have the same names."""
    return _timed_jobs(block, told, CHINA_TIME_ZONE, _CHINA)


def _any_jobs(block: TraceBlock, told: ReadContext) -> RowsByTable:
    """Read a list from elsewhere with these columns, whose clock nothing tells."""
    return _timed_jobs(block, told, "UTC", "")


def _timed_jobs(block: TraceBlock, told: ReadContext, zone: str, why: str) -> RowsByTable:
    submit, start, end = (
        read_times(block, name, zone, why) for name in ("submit_time", "start_time", "end_time")
    )
    # Kalos counts durations from submission.
    block.check_unit("duration", end - start, end - submit, said="the time from start to end")
    nodes = read_numbers(block, "node_num")
    return make_job_rows(
        block,
        told,
        job=read_text(block, "job_id"),
        user=read_text(block, "user"),
        partition=read_text(block, "vc"),
        team=read_text(block, "vc"),
        workload=read_text(block, "type"),
        state=read_states(block, "state"),
        submit_s=submit,
        start_s=start,
        end_s=end,
        gpus=read_numbers(block, "gpu_num"),
        cpus=read_numbers(block, "cpu_num"),
        num_nodes=to_counts(nodes),
        memory_requested=read_numbers(block, "mem_per_pod_GB", GIB) * nodes,
    )


def _philly_durations(block: TraceBlock, told: ReadContext) -> RowsByTable:
    submit = read_times(block, "timestamp", PACIFIC_TIME_ZONE, _PACIFIC)
    duration, gpus = read_numbers(block, "duration"), read_numbers(block, "num_gpus")
    block.check_unit(
        "gpu_time", duration * gpus, said="the duration times the GPUs", every_row=True
    )
    return make_job_rows(
        block,
        told,
        job=name_jobs_by_row(block, told),
        partition=read_text(block, "cluster"),
        team=read_text(block, "cluster"),
        submit_s=submit,
        start_s=submit,
        end_s=submit + duration,
        gpus=gpus,
        reason=[UNKNOWN_WAIT] * block.num_rows,
        state=["unknown"] * block.num_rows,
    )


def _simulated(
    block: TraceBlock, told: ReadContext, scale: float, duration: Floats, priority: Floats
) -> RowsByTable:
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
        end_s=submit + duration * scale,
        gpus=read_numbers(block, "num_gpu"),
        reason=[UNKNOWN_WAIT] * block.num_rows,
        state=["unknown"] * block.num_rows,
        priority=priority,
    )


def _muri(block: TraceBlock, told: ReadContext) -> RowsByTable:
    """Read Muri's workloads, in milliseconds: durations are rounded to seconds, work is not."""
    duration = read_numbers(block, "duration")
    work = read_numbers(block, "iterations") * read_numbers(block, "iteration_time")
    block.check_unit("duration", work, said="the iterations times their time", every_row=True)
    with np.errstate(invalid="ignore"):
        exact = np.where(np.abs(work - duration) <= _SECOND_MS, work, duration)
    priority = read_numbers(block, "priority", signed=True)
    return _simulated(block, told, 1e-3, exact, priority)


def _chronus(block: TraceBlock, told: ReadContext) -> RowsByTable:
    """Read Chronus' workloads, in minutes: an hour is 60 of its units.

    `expect_time_list` has the moments after submission by which a job is worth less, the last of
    them the one after which it is worth nothing; jobs of best effort have none.
    """
    unknown = np.full(block.num_rows, np.nan)
    found = _simulated(block, told, _MINUTE_S, read_numbers(block, "duration"), unknown)
    expected = pc.extract_regex(read_text(block, "expect_time_list"), r"^(?:\d+-)*(?P<last>\d+)$")
    due = pc.struct_field(expected, "last").cast(pa.float64())
    due_s = np.asarray(due.to_numpy(zero_copy_only=False), dtype=np.float64) * _MINUTE_S
    due_s = np.where(read_numbers(block, "best_effort") == 1, np.nan, due_s)
    jobs = found["jobs"]
    deadline = np.asarray(jobs["submit_s"].to_numpy(), dtype=np.float64) + due_s
    place = jobs.schema.get_field_index("deadline_s")
    return {"jobs": jobs.set_column(place, "deadline_s", pa.array(deadline, from_pandas=True))}


def _muri_run(block: TraceBlock, told: ReadContext) -> RowsByTable:
    """Read jobs that ran on a real cluster; policies stop and resume them in between."""
    submit, end = read_numbers(block, "submit_time"), read_numbers(block, "end_time")
    block.check_unit("JCT", end - submit, said="the time from submission to end", every_row=True)
    return make_job_rows(
        block,
        told,
        job=read_text(block, "job_id"),
        submit_s=submit,
        start_s=read_numbers(block, "start_time"),
        end_s=end,
        gpus=read_numbers(block, "num_gpu"),
        state=["completed"] * block.num_rows,
    )


def _sia(block: TraceBlock, told: ReadContext) -> RowsByTable:
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


def _spot(block: TraceBlock, told: ReadContext) -> RowsByTable:
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
        num_nodes=to_counts(np.where(workers > 0, workers, np.nan)),
        reason=[UNKNOWN_WAIT] * block.num_rows,
        state=["unknown"] * block.num_rows,
    )


_JOB = "job_id, user, gpu_num, cpu_num, state, submit_time, start_time, end_time"
TRACE_FORMATS: tuple[TraceFormat, ...] = (
    define_format(
        "Acme jobs of Kalos", f"{_JOB}, type, mem_per_pod_GB", _china_jobs, "Kalos", dates=True
    ),
    define_format(
        "Acme jobs", f"{_JOB}, type", _china_jobs, "Seren", without="mem_per_pod_GB, vc", dates=True
    ),
    define_format("Helios jobs", f"{_JOB}, vc", _china_jobs, dates=True),
    define_format(
        "jobs", "job_id, gpu_num, state, submit_time, start_time, end_time", _any_jobs, dates=True
    ),
    define_format(
        "Philly jobs by duration",
        "timestamp, duration, num_gpus, gpu_time, cluster",
        _philly_durations,
        "Philly",
        dates=True,
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
