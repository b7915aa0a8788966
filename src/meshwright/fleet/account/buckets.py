"""The buckets that GPU-hours end in, and by what evidence they come to be there."""

from typing import Final, NamedTuple


class GpuHourBucket(NamedTuple):
    """One use that a GPU-hour can be put to; every hour is in exactly one."""

    name: str
    title: str
    description: str
    """What counts as this, in a sentence."""
    allocated: bool
    """Whether a job held the GPU meanwhile."""


BUCKETS: Final = (
    GpuHourBucket("productive", "productive", "work that the job kept", True),
    GpuHourBucket(
        "unmeasured", "held, not measured", "a job held it, and nothing tells what it did", True
    ),
    GpuHourBucket("startup", "start-up", "from the start of an attempt to its first work", True),
    GpuHourBucket("checkpoint", "checkpointing", "training stood still to save its state", True),
    GpuHourBucket("data_wait", "data wait", "the step waited for its data", True),
    GpuHourBucket(
        "communication", "exposed communication", "exchange that no computation hid", True
    ),
    GpuHourBucket("idle", "idle but held", "a job held the GPU and nothing ran on it", True),
    GpuHourBucket(
        "lost_work", "failed work lost", "work of a failed attempt that no checkpoint kept", True
    ),
    GpuHourBucket("down", "down", "the node was down", False),
    GpuHourBucket(
        "draining", "draining", "the node took no more jobs and this GPU was free", False
    ),
    GpuHourBucket(
        "fragmented",
        "free: fragmented",
        "jobs waited that the free GPUs together would have held, but no placement did",
        False,
    ),
    GpuHourBucket(
        "queue_order", "free: queue order", "jobs waited for which a place was free", False
    ),
    GpuHourBucket(
        "quota", "free: limits and quotas", "jobs waited whom a limit or quota held back", False
    ),
    GpuHourBucket(
        "insufficient_gpus",
        "free: smaller than any pending job",
        "who waited asked for more than was free",
        False,
    ),
    GpuHourBucket("reserved", "free: reserved", "kept free by a reservation", False),
    GpuHourBucket("no_demand", "free: no demand", "no job waited that could have used it", False),
    GpuHourBucket("unknown", "free: state unknown", "nobody tells how the node stood", False),
)
"""In the order they are shown."""

BUCKET_TITLES: Final = {bucket.name: bucket.title for bucket in BUCKETS}

EVIDENCE_TITLES: Final = {
    "progress": "reported by the job",
    "samples": "measured on the GPU",
    "accounting": "kept by the scheduler",
    "nodes": "reported by node states",
    "unknown": "assumed: no data",
}
"""What the hours of a bucket are known by."""


class AccountCell(NamedTuple):
    """Hours of one bucket that are known in one way."""

    bucket: str
    evidence: str


ALLOCATED_CELLS: Final = (
    AccountCell("productive", "progress"),
    AccountCell("productive", "samples"),
    AccountCell("productive", "accounting"),
    AccountCell("unmeasured", "unknown"),
    AccountCell("startup", "progress"),
    AccountCell("startup", "samples"),
    AccountCell("checkpoint", "progress"),
    AccountCell("data_wait", "progress"),
    AccountCell("communication", "progress"),
    AccountCell("idle", "samples"),
    AccountCell("idle", "accounting"),
    AccountCell("lost_work", "progress"),
    AccountCell("lost_work", "unknown"),
)
"""What held hours can be, in the order of the columns of `GpuHourAccount.cells_by_attempt`."""

WORKED_CELLS: Final = tuple(
    cell for cell in ALLOCATED_CELLS if cell.bucket in ("productive", "unmeasured")
)
"""Held hours that are work, as far as anybody knows."""

FREE_CELLS: Final = (
    AccountCell("down", "nodes"),
    AccountCell("draining", "nodes"),
    AccountCell("fragmented", "nodes"),
    AccountCell("queue_order", "nodes"),
    AccountCell("queue_order", "unknown"),
    AccountCell("quota", "accounting"),
    AccountCell("insufficient_gpus", "nodes"),
    AccountCell("reserved", "nodes"),
    AccountCell("no_demand", "nodes"),
    AccountCell("no_demand", "unknown"),
    AccountCell("unknown", "unknown"),
)
"""What hours that no job held can be."""

CELL_INDEX: Final = {cell: at for at, cell in enumerate(ALLOCATED_CELLS)}


def find_cell_index(bucket: str, evidence: str) -> int:
    """Return the column of held hours of that bucket and evidence."""
    return CELL_INDEX[AccountCell(bucket, evidence)]
