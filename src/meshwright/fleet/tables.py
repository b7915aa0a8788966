"""The tables a fleet is known by: every source fills them, every analysis reads them.

Times are seconds since 1970 in UTC, sizes are bytes, shares lie between 0 and 1. What a source does
not know is null, never nought: a GPU of which there is no sample is not idle. The columns under
`PRIMARY_KEYS` name a row, so that the same row read twice is one row; of two versions the one with
the later `seen_s` holds.
"""

from typing import Final

import pyarrow as pa

_TEXT, _TIME = pa.string(), pa.float64()

JOB_STATES: Final = (
    "pending", "running", "completed", "failed", "cancelled", "timeout", "out_of_memory",
    "node_fail", "preempted", "requeued", "unknown",
)  # fmt: skip
"""How an attempt of a job stands or ended."""

UNKNOWN_WAIT: Final = "its wait is not told"
"""Reason of jobs of which only submission and duration are known: they stand as if begun at once,
so that their GPU-hours count, and their wait means nothing."""

NODE_STATES: Final = ("up", "draining", "down", "reserved", "unknown")

JOB_PHASES: Final = (
    "startup",
    "productive",
    "checkpoint",
    "data_wait",
    "communication",
    "lost_work",
)
"""What the GPUs of a job were busy with, by its own account; `communication` is what nothing hid,
`lost_work` is work that no checkpoint kept."""

GPU_METRICS: Final = {
    "gpu_util": "share of the time in which a kernel was resident",
    "engine_active": "share of the time in which any engine was active",
    "sm_active": "share of cycles and SMs with a warp resident",
    "sm_occupancy": "resident warps over the most there can be",
    "tensor_active": "share of cycles in which the tensor pipe was busy",
    "dram_active": "share of cycles in which memory was busy",
    "fp16_active": "share of cycles of the fp16 pipe",
    "fp32_active": "share of cycles of the fp32 pipe",
    "fp64_active": "share of cycles of the fp64 pipe",
    "memory_used": "bytes of its memory in use",
    "memory_total": "bytes of its memory",
    "power_w": "watts",
    "temperature_c": "degrees of the chip",
    "memory_temperature_c": "degrees of the memory",
    "sm_clock_mhz": "clock",
    "throttle": "reasons why clocks are held back, as DCGM's bits",
    "pcie_tx": "bytes a second to the host",
    "pcie_rx": "bytes a second from the host",
    "nvlink_tx": "bytes a second to other GPUs",
    "nvlink_rx": "bytes a second from other GPUs",
}
"""Columns of samples of a GPU, whatever a source calls them and in whatever unit."""

NODE_METRICS: Final = {
    "cpu_util": "share of cores that are busy",
    "memory_used": "bytes of host memory in use",
    "memory_total": "bytes of host memory",
    "storage_read": "bytes a second from shared storage",
    "storage_write": "bytes a second to shared storage",
    "metadata_ops": "opens, stats and the like a second on shared storage",
    "net_tx": "bytes a second into the fabric",
    "net_rx": "bytes a second out of the fabric",
    "io_wait": "share of cores that wait for storage",
}
"""Columns of samples of a node."""

FRACTION_METRICS: Final = (
    "gpu_util", "engine_active", "sm_active", "sm_occupancy", "tensor_active", "dram_active",
    "fp16_active", "fp32_active", "fp64_active", "cpu_util", "io_wait",
)  # fmt: skip
"""Those of both that lie between 0 and 1."""

JOBS = pa.schema(
    [
        ("cluster", _TEXT),
        ("job", _TEXT),  # "71", or "71_3" of an array
        ("attempt", pa.int32()),  # 0, and one more each time it was requeued
        (
            "scheduler_id",
            _TEXT,
        ),  # the scheduler's own, which prologs and telemetry tell: "75" of "71_3"
        ("name", _TEXT),
        ("user", _TEXT),
        ("team", _TEXT),  # Slurm's account, a Kubernetes namespace
        ("partition", _TEXT),  # a queue, a node pool
        ("qos", _TEXT),
        ("array", _TEXT),  # the job it is an element of
        ("state", _TEXT),  # of JOB_STATES
        ("exit_code", pa.int32()),
        ("signal", pa.int32()),
        ("reason", _TEXT),  # why it waits, or why it ended
        ("interactive", pa.bool_()),  # a shell or a notebook
        ("workload", _TEXT),  # the model or kind of work, where it is told
        ("submit_s", _TIME),
        ("eligible_s", _TIME),
        ("start_s", _TIME),
        ("end_s", _TIME),
        ("time_limit_s", _TIME),  # the longest it may run
        ("deadline_s", _TIME),  # when it should be done
        ("priority", pa.float64()),  # the higher goes first
        ("gpus", pa.float64()),  # asked for or given; parts of one are allowed
        ("gpu_kind", _TEXT),
        ("num_nodes", pa.int32()),
        ("nodes", pa.list_(_TEXT)),
        ("cpus", pa.float64()),
        ("memory_requested", pa.float64()),  # of hosts
        ("memory_peak", pa.float64()),
        ("cpu_s", pa.float64()),  # core-seconds used
        ("gpu_util", pa.float64()),  # the mean over its GPUs, where accounting keeps it
        ("gpu_memory_peak", pa.float64()),  # the sum over its GPUs, likewise
        ("seen_s", _TIME),
    ]
)
"""Attempts of jobs."""

ALLOCATIONS = pa.schema(
    [
        ("cluster", _TEXT),
        ("job", _TEXT),
        ("attempt", pa.int32()),
        ("node", _TEXT),
        ("gpu", pa.int32()),  # its index at the time; see GPUS
        ("start_s", _TIME),
        ("end_s", _TIME),
        ("gpu_fraction", pa.float64()),  # 1, or the part of it that is held
        ("seen_s", _TIME),
    ]
)
"""Which GPU was whose. Accounting does not keep this; prologs and pod labels do."""

NODES = pa.schema(
    [
        ("cluster", _TEXT),
        ("node", _TEXT),
        ("since_s", _TIME),
        ("until_s", _TIME),  # null: still
        ("state", _TEXT),  # of NODE_STATES
        ("reason", _TEXT),
        ("gpus", pa.int32()),
        ("gpu_kind", _TEXT),
        ("partitions", pa.list_(_TEXT)),
        ("cpus", pa.float64()),
        ("memory", pa.float64()),
        ("seen_s", _TIME),
    ]
)
"""What nodes there were and how they stood, one row for each stretch of time."""

GPUS = pa.schema(
    [
        ("cluster", _TEXT),
        ("node", _TEXT),
        ("gpu", pa.int32()),
        ("uuid", _TEXT),  # the device itself; indexes change when one is lost
        ("since_s", _TIME),
        ("until_s", _TIME),
        ("kind", _TEXT),
        ("memory", pa.float64()),
        ("seen_s", _TIME),
    ]
)
"""Which device had which index."""

GPU_SAMPLES = pa.schema(
    [
        ("cluster", _TEXT),
        ("node", _TEXT),
        ("gpu", pa.int32()),
        ("time_s", _TIME),
        *((name, pa.float32()) for name in GPU_METRICS),
    ]
)
"""What GPUs were measured to do, one row for each moment."""

NODE_SAMPLES = pa.schema(
    [
        ("cluster", _TEXT),
        ("node", _TEXT),
        ("time_s", _TIME),
        *((name, pa.float64()) for name in NODE_METRICS),
    ]
)
"""The same of nodes."""

EVENTS = pa.schema(
    [
        ("cluster", _TEXT),
        ("node", _TEXT),
        ("gpu", pa.int32()),  # null: of the node
        ("time_s", _TIME),
        ("kind", _TEXT),  # "xid", "ecc", "row_remap", "nvlink", "infiniband", "pcie", "drain", …
        ("code", pa.int32()),  # the number of an Xid
        ("count", pa.float64()),  # by how much a counter rose
        ("text", _TEXT),
    ]
)
"""Faults and other things that happen at a moment."""

PROGRESS = pa.schema(
    [
        ("cluster", _TEXT),
        ("job", _TEXT),
        ("attempt", pa.int32()),
        ("start_s", _TIME),
        ("end_s", _TIME),
        ("phase", _TEXT),  # of JOB_PHASES
        ("step", pa.int64()),  # the last one reached
        ("mfu", pa.float64()),
        ("seen_s", _TIME),
    ]
)
"""What jobs tell of themselves: our trainer's metrics, and of any PyTorch job `mw watch`."""

TABLE_SCHEMAS: Final = {
    "jobs": JOBS,
    "allocations": ALLOCATIONS,
    "nodes": NODES,
    "gpus": GPUS,
    "gpu_samples": GPU_SAMPLES,
    "node_samples": NODE_SAMPLES,
    "events": EVENTS,
    "progress": PROGRESS,
}

PRIMARY_KEYS: Final = {
    "jobs": ("cluster", "job", "attempt"),
    "allocations": ("cluster", "job", "attempt", "node", "gpu", "start_s"),
    "nodes": ("cluster", "node", "since_s"),
    "gpus": ("cluster", "node", "gpu", "since_s"),
    "gpu_samples": ("cluster", "node", "gpu", "time_s"),
    "node_samples": ("cluster", "node", "time_s"),
    "events": ("cluster", "node", "gpu", "time_s", "kind", "code"),
    "progress": ("cluster", "job", "attempt", "start_s"),
}
"""What names a row."""
