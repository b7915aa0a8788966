"""What the rows of an Nsight export are, where they ran, and what its numbers of kinds mean."""

from enum import IntEnum
from typing import NamedTuple


class Group(IntEnum):
    """What the rows of a table are; work on devices comes first."""

    KERNEL = 0
    COPY = 1
    FILL = 2
    GRAPH = 3
    SYNC = 4
    CALL = 5
    RANGE = 6
    OPEN_RANGE = 7
    """A range that may cross others of its thread: started and ended, not pushed and popped."""
    OVERHEAD = 8


class Place(NamedTuple):
    """Where rows ran."""

    group: Group
    owner: int
    """Nsight's number of the process (of a device's row) or thread."""
    device: int
    stream: int


# Numbers of Nsight's tables ENUM_CUDA_MEMCPY_OPER, ENUM_CUDA_MEM_KIND, ENUM_CUPTI_SYNC_TYPE and
# ENUM_NSYS_EVENT_TYPE; the names are those that the profiler of PyTorch gives the same things.
COPIES = (
    "?", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP",
    "Unified HtoD", "Unified DtoH", "Unified DtoD",
)  # fmt: skip
MEMORIES = (
    "Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static", "Unknown"
)  # fmt: skip
WAITS = ("Sync", "Event Sync", "Stream Wait Event", "Stream Sync", "Context Sync")
MARK, PUSHED, STARTED, TEXT_PUSHED, TEXT_STARTED = 34, 59, 60, 70, 71
NO_STREAM = 2**32 - 1
