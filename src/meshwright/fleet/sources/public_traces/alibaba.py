"""Alibaba's traces: nodes and pods of 2023, recommenders of 2025, spot nodes and pods of 2026.

Their times are seconds from a beginning that is not told: they stand in 1970.
"""

import numpy as np
import pyarrow as pa

from meshwright.fleet.columns import group_rows
from meshwright.fleet.sources.public_traces.columns import (
    GIB,
    MIB,
    read_numbers,
    read_shares,
    read_states,
    read_text,
    to_counts,
)
from meshwright.fleet.sources.public_traces.trace_block import TraceBlock
from meshwright.fleet.sources.public_traces.trace_format import (
    ReadContext,
    RowsByTable,
    TraceFormat,
    define_format,
    make_job_rows,
    make_node_rows,
)
from meshwright.fleet.sources.source import make_rows

_MILLI = 1e-3
NODES_2023 = "Alibaba 2023 nodes"


def _nodes_2023(block: TraceBlock, told: ReadContext) -> RowsByTable:
    return make_node_rows(
        told,
        read_text(block, "sn"),
        np.zeros(block.num_rows),
        gpus=to_counts(read_numbers(block, "gpu")),
        gpu_kind=read_text(block, "model"),
        cpus=read_numbers(block, "cpu_milli", _MILLI),
        memory=read_numbers(block, "memory_mib", MIB),
    )


def _pods_2023(block: TraceBlock, told: ReadContext) -> RowsByTable:
    """Read pods; those that share a GPU ask for thousandths of one."""
    share = read_numbers(block, "gpu_milli", _MILLI)
    with np.errstate(invalid="ignore"):
        block.add_fault(share > 1.0, "gpu_milli", "is more than a GPU", "write 0 to 1000")
    return make_job_rows(
        block,
        told,
        job=read_text(block, "name"),
        qos=read_text(block, "qos"),
        gpu_kind=read_text(block, "gpu_spec"),
        state=read_states(block, "pod_phase"),
        submit_s=read_numbers(block, "creation_time"),
        start_s=read_numbers(block, "scheduled_time"),
        end_s=read_numbers(block, "deletion_time"),
        gpus=read_numbers(block, "num_gpu") * share,
        cpus=read_numbers(block, "cpu_milli", _MILLI),
        memory_requested=read_numbers(block, "memory_mib", MIB),
    )


def _recommenders_2025(block: TraceBlock, told: ReadContext) -> RowsByTable:
    """Read instances of recommenders: nodes that compute, and nodes with a GPU."""
    start = read_numbers(block, "scheduled_time")
    return make_job_rows(
        block,
        told,
        job=read_text(block, "instance_sn"),
        name=read_text(block, "app_name"),
        workload=read_text(block, "app_name"),
        qos=read_text(block, "role"),
        submit_s=read_numbers(block, "creation_time"),
        start_s=start,
        end_s=read_numbers(block, "deletion_time"),
        gpus=read_numbers(block, "gpu_request"),
        cpus=read_numbers(block, "cpu_request"),
        memory_requested=read_numbers(block, "memory_request", GIB),
        state=["running"] * block.num_rows,
    )


def _nodes_2026(block: TraceBlock, told: ReadContext) -> RowsByTable:
    return make_node_rows(
        told,
        read_text(block, "node_name"),
        np.zeros(block.num_rows),
        gpus=to_counts(read_numbers(block, "gpu_capacity_num")),
        gpu_kind=read_text(block, "gpu_model"),
        cpus=read_numbers(block, "cpu_num"),
    )


def _pod_metric(block: TraceBlock, told: ReadContext) -> RowsByTable:
    """Read a metric of pods that hold one GPU each.

    All metrics have the same three columns: which one it is, only the file's name tells. Activity
    makes a pod a job as well, from its first sample to its last.
    """
    name = told.table.stem
    if "gpu_duty_cycle" in name:
        column, values = "gpu_util", read_shares(block, "value")
    elif "gpu_memory_used" in name:
        column, values = "memory_used", read_numbers(block, "value")
    else:
        return {}
    pod, time = read_text(block, "container_ip"), read_numbers(block, "timestamp_anon")
    count = block.num_rows
    samples = {
        "cluster": [told.cluster] * count,
        "node": pod,
        "gpu": np.zeros(count, dtype=np.int32),
        "time_s": time,
        column: values.astype(np.float32),
    }
    found: RowsByTable = {"gpu_samples": make_rows("gpu_samples", samples)}
    if column == "gpu_util":
        found |= _pods(pod, time, told)
    return found


def _pods(pod: pa.Array, time: np.ndarray, told: ReadContext) -> RowsByTable:
    place = group_rows(pod)
    count = int(place.max()) + 1 if len(place) else 0
    first, last = np.full(count, np.inf), np.full(count, -np.inf)
    np.minimum.at(first, place, time)
    np.maximum.at(last, place, time)
    names = pod.dictionary_encode().dictionary
    alike = {
        "cluster": [told.cluster] * count,
        "job": names,
        "attempt": np.zeros(count, dtype=np.int32),
        "start_s": first,
        "end_s": last,
        "seen_s": np.full(count, told.seen_s),
    }
    job = {"submit_s": first, "gpus": np.ones(count), "state": ["running"] * count}
    held = {"node": names, "gpu": np.zeros(count, dtype=np.int32), "gpu_fraction": np.ones(count)}
    return {
        "jobs": make_rows("jobs", alike | job),
        "allocations": make_rows("allocations", alike | held),
    }


TRACE_FORMATS: tuple[TraceFormat, ...] = (
    define_format(NODES_2023, "sn, cpu_milli, memory_mib, gpu, model", _nodes_2023),
    define_format(
        "Alibaba 2023 pods",
        "name, cpu_milli, memory_mib, num_gpu, gpu_milli",
        _pods_2023,
    ),
    define_format(
        "Alibaba 2025 recommenders",
        "instance_sn, role, app_name, cpu_request, gpu_request, creation_time, scheduled_time",
        _recommenders_2025,
    ),
    define_format(
        "Alibaba 2026 nodes", "node_name, gpu_model, gpu_capacity_num, cpu_num", _nodes_2026
    ),
    define_format(
        "Alibaba 2026 pods",
        "timestamp_anon, value, container_ip",
        _pod_metric,
        whole=True,
        without="request_type",
    ),
)
