"""The buckets that GPU-hours end in, and by what evidence they come to be there."""

from typing import Final, NamedTuple


class Bucket(NamedTuple):
    """One use that a GPU-hour can be put to; every hour is in exactly one."""

    name: str
    title: str
    about: str
    """What counts as this, in a sentence."""
    held: bool
    """Whether a job held the GPU meanwhile."""


BUCKETS: Final = (
    Bucket("productive", "productive", "work that the job kept", True),
    Bucket("startup", "start-up", "from the start of an attempt to its first work", True),
    Bucket("checkpoint", "checkpointing", "training stood still to save its state", True),
    Bucket("data_wait", "data wait", "the step waited for its data", True),
    Bucket("communication", "exposed communication", "exchange that no computation hid", True),
    Bucket("idle", "idle but held", "a job held the GPU and nothing ran on it", True),
    Bucket("lost", "failed work lost", "work of a failed attempt that no checkpoint kept", True),
    Bucket("down", "down", "the node was down", False),
    Bucket("draining", "draining", "the node took no more jobs and this GPU was free", False),
    Bucket(
        "fragmented", "free: fragmented",
        "jobs waited that the free GPUs together would have held, but no placement did", False,
    ),
    Bucket("order", "free: queue order", "jobs waited for which a place was free", False),
    Bucket(
        "limits", "free: limits and quotas", "jobs waited whom a limit or quota held back", False
    ),
    Bucket("too_few", "free: too few for any", "who waited asked for more than was free", False),
    Bucket("reserved", "free: reserved", "kept free by a reservation", False),
    Bucket("no_demand", "free: no demand", "no job waited that could have used it", False),
    Bucket("unknown", "free: state unknown", "nobody tells how the node stood", False),
)  # fmt: skip
"""In the order they are shown."""

TITLES: Final = {bucket.name: bucket.title for bucket in BUCKETS}

EVIDENCE: Final = {
    "progress": "told by the job itself",
    "samples": "measured on the GPU",
    "accounting": "kept by the scheduler",
    "nodes": "told by the states of nodes",
    "unknown": "merely assumed: nothing tells",
}
"""What the hours of a bucket are known by."""


class Cell(NamedTuple):
    """Hours of one bucket that are known in one way."""

    bucket: str
    evidence: str


CELLS: Final = (
    Cell("productive", "progress"),
    Cell("productive", "samples"),
    Cell("productive", "accounting"),
    Cell("productive", "unknown"),
    Cell("startup", "progress"),
    Cell("startup", "samples"),
    Cell("checkpoint", "progress"),
    Cell("data_wait", "progress"),
    Cell("communication", "progress"),
    Cell("idle", "samples"),
    Cell("idle", "accounting"),
    Cell("lost", "progress"),
    Cell("lost", "unknown"),
)
"""What held hours can be, in the order of the columns of `Account.by_attempt`."""

FREE_CELLS: Final = (
    Cell("down", "nodes"),
    Cell("draining", "nodes"),
    Cell("fragmented", "nodes"),
    Cell("order", "nodes"),
    Cell("order", "unknown"),
    Cell("limits", "accounting"),
    Cell("too_few", "nodes"),
    Cell("reserved", "nodes"),
    Cell("no_demand", "nodes"),
    Cell("no_demand", "unknown"),
    Cell("unknown", "unknown"),
)
"""What hours that no job held can be."""

COLUMN: Final = {cell: at for at, cell in enumerate(CELLS)}


def column(bucket: str, evidence: str) -> int:
    """Return the column of held hours of that bucket and evidence."""
    return COLUMN[Cell(bucket, evidence)]
