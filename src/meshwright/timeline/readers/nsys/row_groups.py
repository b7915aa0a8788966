"""What the rows of an Nsight export are, where they ran, and what its numbers of kinds mean."""

from enum import IntEnum
from typing import NamedTuple


class NsysRowGroup(IntEnum):
    """What the rows of a table are; work on devices comes first."""

    KERNEL = 0
    MEMCPY = 1
    MEMSET = 2
    GRAPH = 3
    SYNC = 4
    API_CALL = 5
    NVTX_RANGE = 6
    OPEN_NVTX_RANGE = 7
    """A range that may cross others of its thread: started and ended, not pushed and popped."""
    OVERHEAD = 8


class NsysTrack(NamedTuple):
    """Where rows ran."""

    group: NsysRowGroup
    global_id: int
    """Nsight's number of the process (of a device's row) or thread."""
    device: int
    stream: int


# Numbers of Nsight's tables ENUM_CUDA_MEMCPY_OPER, ENUM_CUDA_MEM_KIND, ENUM_CUPTI_SYNC_TYPE and
# ENUM_NSYS_EVENT_TYPE; the names are those that the profiler of PyTorch gives the same things.
MEMCPY_KINDS = (
    "?", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP",
    "Unified HtoD", "Unified DtoH", "Unified DtoD",
)  # fmt: skip
MEMORY_KINDS = (
    "Pageable", "Pinned", "Device", "Array", "Managed", "Device Static", "Managed Static", "Unknown"
)  # fmt: skip
SYNC_KINDS = ("Sync", "Event Sync", "Stream Wait Event", "Stream Sync", "Context Sync")
NVTX_MARK, NVTX_PUSH_POP, NVTX_START_END, NVTX_TEXT_PUSH_POP, NVTX_TEXT_START_END = (
    34,
    59,
    60,
    70,
    71,
)
NO_STREAM = 2**32 - 1
