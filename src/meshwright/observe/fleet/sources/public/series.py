"""Series over time: capacity by the day, ports of switches, one metric of many GPUs."""

import re

import numpy as np
import pyarrow as pa

from meshwright.observe.fleet.measures.windows import numbered
from meshwright.observe.fleet.sources.public.accounts import CHINA
from meshwright.observe.fleet.sources.public.columns import MIB, number, seconds, text
from meshwright.observe.fleet.sources.public.files import Part
from meshwright.observe.fleet.sources.public.form import Form, Tables, Told, form, nodes
from meshwright.observe.fleet.sources.source import rows_of

_PERCENT = 0.01
_GPU_METRICS = {
    "GPU_UTIL": ("gpu_util", _PERCENT),
    "SM_ACTIVE": ("sm_active", _PERCENT),
    "SM_OCCUPANCY": ("sm_occupancy", _PERCENT),
    "PIPE_TENSOR_ACTIVE": ("tensor_active", _PERCENT),
    "DRAM_ACTIVE": ("dram_active", _PERCENT),
    "FB_USED": ("memory_used", MIB),
    "POWER_USAGE": ("power_w", 1.0),
    "GPU_TEMP": ("temperature_c", 1.0),
    "MEMORY_TEMP": ("memory_temperature_c", 1.0),
}
_NODE_METRICS = {
    "NODE_CPU_UTILIZATION": ("cpu_util", _PERCENT),
    "NODE_IB_SEND": ("net_tx", 1.0),
    "NODE_IB_RECEIVE": ("net_rx", 1.0),
}
_ADDRESS = re.compile(r"^(\d+\.\d+\.\d+\.\d+)(?:[-_.:](?:gpu|mlx5_)?(\d+))?$")
"""A server, or a server and the index of its GPU."""


def side_by_side(part: Part) -> bool:
    """Say whether a table has one column for each server or GPU, as Acme's samples have."""
    others = part.columns[1:]
    return bool(
        part.columns[:1] == ("Time",) and others and all(_ADDRESS.match(name) for name in others)
    )


def read_side_by_side(block: pa.Table, told: Told) -> Tables:
    """Read one metric of servers or of GPUs; only the file's name tells which."""
    metric = next(
        (name for name in (*_NODE_METRICS, *_GPU_METRICS) if told.part.stem.startswith(name)), ""
    )
    of_gpus = metric in _GPU_METRICS
    column, scale = (_GPU_METRICS | _NODE_METRICS).get(metric, ("", 1.0))
    if not column:
        return {}
    table = "samples" if of_gpus else "node_samples"
    time = seconds(block, "Time", CHINA)
    found = []
    for name in block.column_names[1:]:
        matched = _ADDRESS.match(name)
        values = number(block, name, scale)
        known = ~np.isnan(values)
        if matched is None or not known.any():
            continue
        count = int(known.sum())
        columns: dict[str, object] = {
            "cluster": [told.cluster] * count,
            "node": [matched[1]] * count,
            "time_s": time[known],
            column: values[known].astype(np.float32 if of_gpus else np.float64),
        }
        if of_gpus:
            columns["gpu"] = np.full(count, int(matched[2] or 0), dtype=np.int32)
        found.append(rows_of(table, columns))
    return {table: pa.concat_tables(found)} if found else {}


def _capacity(block: pa.Table, told: Told) -> Tables:
    """Read how many GPUs each virtual cluster had, day by day: one node for each stretch."""
    day = seconds(block, "date", CHINA)
    end = np.append(day[1:], day[-1] + 86_400.0) if len(day) else day
    found = []
    for name in block.column_names:
        if name in ("date", "total"):
            continue
        gpus = np.nan_to_num(number(block, name)).astype(np.int64)
        first = np.flatnonzero(np.append(True, gpus[1:] != gpus[:-1]))
        last = np.append(first[1:], len(gpus)) - 1
        some = gpus[first] > 0
        first, last = first[some], last[some]
        made = nodes(
            told,
            [name] * len(first),
            day[first],
            until_s=end[last],
            gpus=gpus[first].astype(np.int32),
            partitions=pa.array([[name]] * len(first), pa.list_(pa.string())),
        )
        found.append(made["nodes"])
    return {"nodes": pa.concat_tables(found)} if found else {}


def _ports(block: pa.Table, told: Told) -> Tables:
    """Read what ports of switches carried: what comes in goes into the fabric."""
    time = number(block, "SaveTimeUTC", 1e-3)
    name = pa.compute.binary_join_element_wise(
        text(block, "DeviceName"), text(block, "PortName"), " "
    )
    port = numbered(name)
    order = np.lexsort((time, port))
    time, port = time[order], port[order]
    # Counts are of the time since the row before.
    step = np.append(np.nan, np.where(port[1:] == port[:-1], np.diff(time), np.nan))
    step = np.where(step > 0, step, np.nan)
    columns = {
        "cluster": [told.cluster] * block.num_rows,
        "node": name.take(pa.array(order)),
        "time_s": time,
        "net_tx": number(block, "InOctets")[order] / step,
        "net_rx": number(block, "OutOctets")[order] / step,
    }
    rows = rows_of("node_samples", columns)
    return {"node_samples": rows.filter(pa.array(~np.isnan(step)))}


def _virtual_clusters(block: pa.Table, told: Told) -> Tables:
    """Read how many nodes of eight GPUs Philly's virtual clusters were given by Helios' authors."""
    pairs = zip(text(block, "vc").to_pylist(), number(block, "node num").tolist(), strict=True)
    names = [(vc, f"{vc}-{place}") for vc, count in pairs for place in range(int(count))]
    return nodes(
        told,
        [name for _, name in names],
        np.zeros(len(names)),
        gpus=np.full(len(names), 8, dtype=np.int32),
        partitions=pa.array([[vc] for vc, _ in names], pa.list_(pa.string())),
    )


SIDE_BY_SIDE = Form("samples side by side", frozenset({"Time"}), read_side_by_side)
FORMS: tuple[Form, ...] = (
    form("GPUs by day", "date, total", _capacity, whole=True),
    form("ports", "SaveTimeUTC, DeviceName, PortName, InOctets, OutOctets", _ports, whole=True),
    form("Philly virtual clusters", "vc, node num", _virtual_clusters, "Philly"),
    form(
        "levels of a virtual cluster", "time, running_gpu_num, pending_gpu_num, idle_gpu_num", None
    ),
    form("active nodes", "time, active, total", None, "Philly"),
    form("runtimes", "runtime", None, "Philly"),
    form("levels of a run", "time, queue_length, gpu_util, cpu_util", None),
    form("times of workers", "worker, time, batch_time_norm", None),
    form("curves", "cluster, metric, value, cdf_pct", None),
    form("variations of jobs", "0, 1, 2, 3", None, without="workload"),
    form("results of packing", "workload, sc_policy, tune, seed", None),
    form("rates of pods", "timestamp_anon, value, container_ip, request_type", None),
    form("requests", "predict_type, exec_time_seconds, num_inference_steps", None),
    form("summaries of clusters", "id, job_num, gpu_job_num, avg_run_time_gpu", None),
)
