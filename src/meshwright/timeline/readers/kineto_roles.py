"""What the categories of a profiler's events are to a timeline, and how much of them is kept."""

from enum import IntEnum, StrEnum


class Detail(StrEnum):
    """How much of a trace is kept."""

    LEAN = "lean"
    """No arguments, no Python functions."""
    STANDARD = "standard"
    """The arguments of device work, of collectives and of synchronisation."""
    SHAPES = "shapes"
    """Those of operators too: shapes, strides, types."""
    FULL = "full"
    """All arguments."""


class Role(IntEnum):
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


ROLES = {
    "kernel": Role.KERNEL, "Kernel": Role.KERNEL, "mtia_ccp_events": Role.KERNEL,
    "hpu_op": Role.KERNEL, "collective_comm": Role.KERNEL,
    "gpu_memcpy": Role.COPY, "gpu_memset": Role.COPY, "Memcpy": Role.COPY, "Memset": Role.COPY,
    "gpu_user_annotation": Role.MARK, "cuda_profiler_range": Role.MARK,
    "cuda_sync": Role.SYNC, "xpu_sync": Role.SYNC,
    "cuda_runtime": Role.LAUNCH, "cuda_driver": Role.LAUNCH, "Runtime": Role.LAUNCH,
    "mtia_runtime": Role.LAUNCH, "xpu_runtime": Role.LAUNCH, "xpu_driver": Role.LAUNCH,
    "privateuse1_runtime": Role.LAUNCH, "privateuse1_driver": Role.LAUNCH,
    "glow_runtime": Role.LAUNCH,
    "cpu_op": Role.OPERATOR, "Operator": Role.OPERATOR, "user_annotation": Role.OPERATOR,
    "python_function": Role.PYTHON,
    "overhead": Role.OVERHEAD,
    "Trace": Role.PROFILER,
}  # fmt: skip
COLLECTIVE_OPERATOR = "record_param_comms"
