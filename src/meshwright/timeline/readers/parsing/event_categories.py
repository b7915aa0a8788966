"""What the categories of a profiler's events are to a timeline, and how much of them is kept."""

from enum import IntEnum, StrEnum


class TraceDetail(StrEnum):
    """How much of a trace is kept."""

    LEAN = "lean"
    """No arguments, no Python functions."""
    STANDARD = "standard"
    """The arguments of device work, of collectives and of synchronization."""
    SHAPES = "shapes"
    """Those of operators too: shapes, strides, types."""
    FULL = "full"
    """All arguments."""


class EventRole(IntEnum):
    """What the events of a category are; work on devices comes first."""

    KERNEL = 0
    COPY = 1
    MARK = 2
    SYNC = 3
    LAUNCH = 4
    OPERATOR = 5
    PYTHON = 6
    OVERHEAD = 7
    PROFILER = 8
    HOST = 9


CATEGORY_ROLES = {
    "kernel": EventRole.KERNEL, "Kernel": EventRole.KERNEL, "mtia_ccp_events": EventRole.KERNEL,
    "hpu_op": EventRole.KERNEL, "collective_comm": EventRole.KERNEL,
    "gpu_memcpy": EventRole.COPY, "gpu_memset": EventRole.COPY, "Memcpy": EventRole.COPY,
    "Memset": EventRole.COPY,
    "gpu_user_annotation": EventRole.MARK, "cuda_profiler_range": EventRole.MARK,
    "cuda_sync": EventRole.SYNC, "xpu_sync": EventRole.SYNC,
    "cuda_runtime": EventRole.LAUNCH, "cuda_driver": EventRole.LAUNCH, "Runtime": EventRole.LAUNCH,
    "mtia_runtime": EventRole.LAUNCH, "xpu_runtime": EventRole.LAUNCH,
    "xpu_driver": EventRole.LAUNCH,
    "privateuse1_runtime": EventRole.LAUNCH, "privateuse1_driver": EventRole.LAUNCH,
    "glow_runtime": EventRole.LAUNCH,
    "cpu_op": EventRole.OPERATOR, "Operator": EventRole.OPERATOR,
    "user_annotation": EventRole.OPERATOR,
    "python_function": EventRole.PYTHON,
    "overhead": EventRole.OVERHEAD,
    "Trace": EventRole.PROFILER,
}  # fmt: skip
COLLECTIVE_OPERATOR = "record_param_comms"
