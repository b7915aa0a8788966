"""Series over time: capacity by the day, ports of switches, one metric of many GPUs."""

import re

import numpy as np
import pyarrow as pa

from meshwright.fleet.columns import group_rows
from meshwright.fleet.sources.public_traces.columns import (
    MIB,
    read_numbers,
    read_shares,
    read_text,
    read_times,
)
from meshwright.fleet.sources.public_traces.job_lists import CHINA_TIME_ZONE
from meshwright.fleet.sources.public_traces.trace_block import TraceBlock
from meshwright.fleet.sources.public_traces.trace_files import TraceTable
from meshwright.fleet.sources.public_traces.trace_format import (
    ReadContext,
    RowsByTable,
    TraceFormat,
    define_format,
    make_node_rows,
)
from meshwright.fleet.sources.source import make_rows

_CLOCK = "the clock of Helios and Acme"
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
_EPOCH_S = 1e9
"""Seconds since 1970 are so many since 2001."""
_ADDRESS = re.compile(r"^(\d+\.\d+\.\d+\.\d+)(?:[-_.:](?:gpu|mlx5_)?(\d+))?$")
"""A server, or a server and the index of its GPU."""


def is_wide_table(part: TraceTable) -> bool:
    """Say whether a table has one column for each server or GPU, as Acme's samples have."""
    others = part.columns[1:]
    return bool(
        part.columns[:1] == ("Time",) and others and all(_ADDRESS.match(name) for name in others)
    )


def read_wide_table(block: TraceBlock, told: ReadContext) -> RowsByTable:
    """Read one metric of servers or of GPUs; only the file's name tells which."""
    metric = next(
        (name for name in (*_NODE_METRICS, *_GPU_METRICS) if told.table.stem.startswith(name)), ""
    )
    of_gpus = metric in _GPU_METRICS
    column, scale = (_GPU_METRICS | _NODE_METRICS).get(metric, ("", 1.0))
    if not column:
        return {}
    table = "gpu_samples" if of_gpus else "node_samples"
    time = read_times(block, "Time", CHINA_TIME_ZONE, _CLOCK)
    found = []
    for name in block.column_names[1:]:
        matched = _ADDRESS.match(name)
        values = read_shares(block, name) if scale == _PERCENT else read_numbers(block, name, scale)
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
        found.append(make_rows(table, columns))
    return {table: pa.concat_tables(found)} if found else {}


def _capacity(block: TraceBlock, context: ReadContext) -> RowsByTable:
    """Read how many GPUs each virtual cluster had, day by day: one node for each stretch."""
    day = read_times(block, "date", CHINA_TIME_ZONE, _CLOCK)
    names = [name for name in block.column_names if name not in ("date", "total")]
    counts = {name: read_numbers(block, name) for name in names}
    total = np.sum([np.nan_to_num(gpus) for gpus in counts.values()], axis=0)
    told = read_numbers(block, "total")
    with np.errstate(invalid="ignore"):
        block.add_fault(total != told, "total", "is not the sum of the row", "mend one of them")
        block.add_fault(np.append(False, np.diff(day) <= 0), "date", "is not after the row before")
    sound = ~block.faulty
    day = day[sound]
    end = np.append(day[1:], day[-1] + 86_400.0) if len(day) else day
    found = []
    for name, every_count in counts.items():
        gpus = np.nan_to_num(every_count[sound]).astype(np.int64)
        if not len(gpus):
            continue
        first = np.flatnonzero(np.append(True, gpus[1:] != gpus[:-1]))
        last = np.append(first[1:], len(gpus)) - 1
        some = gpus[first] > 0
        first, last = first[some], last[some]
        made = make_node_rows(
            context,
            [name] * len(first),
            day[first],
            until_s=end[last],
            gpus=gpus[first].astype(np.int32),
            partitions=pa.array([[name]] * len(first), pa.list_(pa.string())),
        )
        found.append(made["nodes"])
    return {"nodes": pa.concat_tables(found)} if found else {}


def _ports(block: TraceBlock, told: ReadContext) -> RowsByTable:
    """Read what ports of switches carried: what comes in goes into the fabric."""
    time = read_numbers(block, "SaveTimeUTC", 1e-3)
    with np.errstate(invalid="ignore"):
        seconds = (time > _EPOCH_S / 1e3) & (time < 10 * _EPOCH_S / 1e3)
    what = "is in seconds, where milliseconds are meant"
    block.add_fault(seconds, "SaveTimeUTC", what, "multiply it by 1000")
    name = pa.compute.binary_join_element_wise(
        read_text(block, "DeviceName"), read_text(block, "PortName"), " "
    )
    port = group_rows(name)
    order = np.lexsort((time, port))
    time, port = time[order], port[order]
    # Counts are of the time since the row before.
    step = np.append(np.nan, np.where(port[1:] == port[:-1], np.diff(time), np.nan))
    step = np.where(step > 0, step, np.nan)
    columns = {
        "cluster": [told.cluster] * block.num_rows,
        "node": name.take(pa.array(order)),
        "time_s": time,
        "net_tx": read_numbers(block, "InOctets")[order] / step,
        "net_rx": read_numbers(block, "OutOctets")[order] / step,
    }
    rows = make_rows("node_samples", columns)
    return {"node_samples": rows.filter(pa.array(~np.isnan(step)))}


def _virtual_clusters(block: TraceBlock, told: ReadContext) -> RowsByTable:
    """Read how many nodes of eight GPUs Philly's virtual clusters were given by Helios' authors."""
    pairs = zip(
        read_text(block, "vc").to_pylist(), read_numbers(block, "node num").tolist(), strict=True
    )
    names = [(vc, f"{vc}-{place}") for vc, count in pairs for place in range(int(count))]
    return make_node_rows(
        told,
        [name for _, name in names],
        np.zeros(len(names)),
        gpus=np.full(len(names), 8, dtype=np.int32),
        partitions=pa.array([[vc] for vc, _ in names], pa.list_(pa.string())),
    )


WIDE_TABLE_FORMAT = TraceFormat(
    "samples side by side", frozenset({"Time"}), read_wide_table, has_dates=True
)
TRACE_FORMATS: tuple[TraceFormat, ...] = (
    define_format("GPUs by day", "date, total", _capacity, whole=True, dates=True),
    define_format(
        "ports", "SaveTimeUTC, DeviceName, PortName, InOctets, OutOctets", _ports, whole=True
    ),
    define_format("Philly virtual clusters", "vc, node num", _virtual_clusters, "Philly"),
    define_format(
        "levels of a virtual cluster", "time, running_gpu_num, pending_gpu_num, idle_gpu_num", None
    ),
    define_format("active nodes", "time, active, total", None, "Philly"),
    define_format("runtimes", "runtime", None, "Philly"),
    define_format("levels of a run", "time, queue_length, gpu_util, cpu_util", None),
    define_format("times of workers", "worker, time, batch_time_norm", None),
    define_format("curves", "cluster, metric, value, cdf_pct", None),
    define_format("variations of jobs", "0, 1, 2, 3", None, without="workload"),
    define_format("results of packing", "workload, sc_policy, tune, seed", None),
    define_format("rates of pods", "timestamp_anon, value, container_ip, request_type", None),
    define_format("requests", "predict_type, exec_time_seconds, num_inference_steps", None),
    define_format("summaries of clusters", "id, job_num, gpu_job_num, avg_run_time_gpu", None),
)
