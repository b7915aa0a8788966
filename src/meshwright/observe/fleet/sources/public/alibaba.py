"""Alibaba's traces: nodes and pods of 2023, recommenders of 2025, spot nodes and pods of 2026.

Their times are seconds from a beginning that is not told: they stand in 1970.
"""

import numpy as np
import pyarrow as pa

from meshwright.observe.fleet.measures.windows import numbered
from meshwright.observe.fleet.sources.public.columns import GIB, MIB, number, state, text
from meshwright.observe.fleet.sources.public.form import Form, Tables, Told, form, jobs, nodes
from meshwright.observe.fleet.sources.source import rows_of

_MILLI = 1e-3
NODES_2023 = "Alibaba 2023 nodes"


def _whole(values: np.ndarray) -> pa.Array:
    return pa.array(values, from_pandas=True).cast(pa.int32())


def _nodes_2023(block: pa.Table, told: Told) -> Tables:
    return nodes(
        told,
        text(block, "sn"),
        np.zeros(block.num_rows),
        gpus=_whole(number(block, "gpu")),
        gpu_kind=text(block, "model"),
        cpus=number(block, "cpu_milli", _MILLI),
        memory=number(block, "memory_mib", MIB),
    )


def _pods_2023(block: pa.Table, told: Told) -> Tables:
    """Read pods; those that share a GPU ask for thousandths of one."""
    return jobs(
        block,
        told,
        job=text(block, "name"),
        qos=text(block, "qos"),
        gpu_kind=text(block, "gpu_spec"),
        state=state(block, "pod_phase"),
        submit_s=number(block, "creation_time"),
        start_s=number(block, "scheduled_time"),
        end_s=number(block, "deletion_time"),
        gpus=number(block, "num_gpu") * number(block, "gpu_milli", _MILLI),
        cpus=number(block, "cpu_milli", _MILLI),
        memory_asked=number(block, "memory_mib", MIB),
    )


def _recommenders_2025(block: pa.Table, told: Told) -> Tables:
    """Read instances of recommenders: nodes that compute, and nodes with a GPU."""
    start = number(block, "scheduled_time")
    return jobs(
        block,
        told,
        job=text(block, "instance_sn"),
        name=text(block, "app_name"),
        work=text(block, "app_name"),
        qos=text(block, "role"),
        submit_s=number(block, "creation_time"),
        start_s=start,
        end_s=number(block, "deletion_time"),
        gpus=number(block, "gpu_request"),
        cpus=number(block, "cpu_request"),
        memory_asked=number(block, "memory_request", GIB),
        state=["running"] * block.num_rows,
    )


def _nodes_2026(block: pa.Table, told: Told) -> Tables:
    return nodes(
        told,
        text(block, "node_name"),
        np.zeros(block.num_rows),
        gpus=_whole(number(block, "gpu_capacity_num")),
        gpu_kind=text(block, "gpu_model"),
        cpus=number(block, "cpu_num"),
    )


def _pod_metric(block: pa.Table, told: Told) -> Tables:
    """Read a metric of pods that hold one GPU each.

    All metrics have the same three columns: which one it is, only the file's name tells. Activity
    makes a pod a job as well, from its first sample to its last.
    """
    name = told.part.stem
    if "gpu_duty_cycle" in name:
        column, values = "gpu_util", number(block, "value", 0.01)
    elif "gpu_memory_used" in name:
        column, values = "memory_used", number(block, "value")
    else:
        return {}
    pod, time = text(block, "container_ip"), number(block, "timestamp_anon")
    count = block.num_rows
    samples = {
        "cluster": [told.cluster] * count,
        "node": pod,
        "gpu": np.zeros(count, dtype=np.int32),
        "time_s": time,
        column: values.astype(np.float32),
    }
    found: Tables = {"samples": rows_of("samples", samples)}
    if column == "gpu_util":
        found |= _pods(pod, time, told)
    return found


def _pods(pod: pa.Array, time: np.ndarray, told: Told) -> Tables:
    place = numbered(pod)
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
    held = {"node": names, "gpu": np.zeros(count, dtype=np.int32), "share": np.ones(count)}
    return {"jobs": rows_of("jobs", alike | job), "held": rows_of("held", alike | held)}


FORMS: tuple[Form, ...] = (
    form(NODES_2023, "sn, cpu_milli, memory_mib, gpu, model", _nodes_2023),
    form(
        "Alibaba 2023 pods",
        "name, cpu_milli, memory_mib, num_gpu, gpu_milli",
        _pods_2023,
    ),
    form(
        "Alibaba 2025 recommenders",
        "instance_sn, role, app_name, cpu_request, gpu_request, creation_time, scheduled_time",
        _recommenders_2025,
    ),
    form("Alibaba 2026 nodes", "node_name, gpu_model, gpu_capacity_num, cpu_num", _nodes_2026),
    form(
        "Alibaba 2026 pods",
        "timestamp_anon, value, container_ip",
        _pod_metric,
        whole=True,
        without="request_type",
    ),
)
