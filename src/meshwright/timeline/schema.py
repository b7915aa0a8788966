"""The columns of a timeline: their names, types and meaning.

The one place that says what a span and a counter are; the docs table and the Arrow schema are
both derived from it. Pure data: knows neither Arrow nor files.
"""

from enum import StrEnum

import msgspec

SCHEMA_VERSION = 1
"""Grows when a column changes its meaning or goes away; new optional columns keep it."""


class SpanKind(StrEnum):
    """What a span spends its time on."""

    COMPUTE = "compute"
    """A kernel, or host work that computes."""
    COMMUNICATION = "communication"
    """A collective, a send or a receive."""
    MEMORY_COPY = "memory_copy"
    """A copy or fill between or within memories."""
    HOST = "host"
    """Work of the host: launching, loading data, Python."""
    IDLE = "idle"
    """Nothing to do."""
    WAIT = "wait"
    """Blocked on something else: a stream, a peer, a lock."""


class TimelineSource(StrEnum):
    """Where a timeline comes from."""

    SIMULATED = "simulated"
    """A cost model with a virtual clock; times count from the start of the simulation."""
    MEASURED = "measured"
    """A real run; times count from the Unix epoch."""
    UNKNOWN = "unknown"
    """A file that another tool wrote or rewrote, without our footer."""


class ColumnType(StrEnum):
    """How a column's values are stored."""

    INT32 = "int32"
    INT64 = "int64"
    FLOAT64 = "float64"
    LABEL = "label"
    """A string that repeats; dictionary-encoded in memory and on disk."""
    TEXT = "text"
    """A string that may differ in every row."""


class Column(msgspec.Struct, frozen=True, kw_only=True):
    """One column of the record."""

    name: str
    """Its name, in memory and on disk; carries the unit where there is one."""
    type: ColumnType
    """How its values are stored."""
    description: str
    """What it says, in one sentence."""
    nullable: bool = False
    """Whether a row may leave it out."""
    default: str | int | None = None
    """The value of every row where the whole column is left out; None makes it required."""
    minimum: int | None = None
    """The smallest number that is allowed."""

    @property
    def required(self) -> bool:
        """Whether a timeline cannot be made without this column."""
        return not self.nullable and self.default is None

    @property
    def is_string(self) -> bool:
        """Whether the values are strings."""
        return self.type in {ColumnType.LABEL, ColumnType.TEXT}


def _optional(name: str, kind: ColumnType, about: str) -> Column:
    least = 0 if kind in {ColumnType.INT32, ColumnType.INT64} else None
    return Column(name=name, type=kind, description=about, nullable=True, minimum=least)


SPAN_COLUMNS: tuple[Column, ...] = (
    Column(
        name="rank",
        type=ColumnType.INT32,
        minimum=0,
        description="Global rank of the process group.",
    ),
    Column(
        name="process",
        type=ColumnType.LABEL,
        default="main",
        description="Which process or device of the rank, such as `host` or `gpu 0`.",
    ),
    Column(
        name="lane",
        type=ColumnType.LABEL,
        default="main",
        description="Stream or thread; spans of one lane run in order, or nest.",
    ),
    Column(
        name="start_ns",
        type=ColumnType.INT64,
        description="Start, in ns on the clock that all ranks of the run share.",
    ),
    Column(
        name="duration_ns",
        type=ColumnType.INT64,
        minimum=0,
        description="Length, in ns; 0 is an instant.",
    ),
    Column(name="kind", type=ColumnType.LABEL, description="One of the six kinds of work."),
    Column(
        name="name", type=ColumnType.LABEL, description="What ran: an operator, a kernel, a phase."
    ),
    _optional(
        "flow_out",
        ColumnType.INT64,
        "Id of the flow that starts here: a launch, a send. One span starts a flow.",
    ),
    _optional(
        "flow_in",
        ColumnType.INT64,
        "Id of the flow that ends here: a kernel, a receive. Any number of spans may end it.",
    ),
    _optional("bytes", ColumnType.INT64, "Payload of a communication or copy, in bytes."),
    _optional("collective", ColumnType.LABEL, "Which collective, such as `all_reduce` or `send`."),
    _optional("group", ColumnType.LABEL, "Process group that takes part, such as `tp` or `dp 3`."),
    _optional("dtype", ColumnType.LABEL, "Element type, such as `bf16`."),
    _optional("stage", ColumnType.INT32, "Pipeline stage."),
    _optional("microbatch", ColumnType.INT32, "Microbatch number within the step."),
    _optional("layer", ColumnType.INT32, "Layer number within the model."),
    _optional(
        "category", ColumnType.LABEL, "What a profiler filed it under, such as `cuda_runtime`."
    ),
    _optional("extra", ColumnType.TEXT, "Whatever else is known, as one JSON object."),
)

COUNTER_COLUMNS: tuple[Column, ...] = (
    Column(
        name="rank",
        type=ColumnType.INT32,
        minimum=0,
        description="Global rank of the process group.",
    ),
    Column(
        name="name",
        type=ColumnType.LABEL,
        description="What is counted, such as `memory allocated`.",
    ),
    Column(
        name="unit",
        type=ColumnType.LABEL,
        default="",
        description="Unit of the value: `bytes`, `W`.",
    ),
    Column(
        name="time_ns", type=ColumnType.INT64, description="When, on the same clock as `start_ns`."
    ),
    Column(
        name="value", type=ColumnType.FLOAT64, description="The value from then on; always finite."
    ),
)

SPAN_COLUMNS_BY_NAME: dict[str, Column] = {column.name: column for column in SPAN_COLUMNS}
COUNTER_COLUMNS_BY_NAME: dict[str, Column] = {column.name: column for column in COUNTER_COLUMNS}

ABSENT = -1
"""Stands for "no value" in integer columns and codes, where numpy has no null."""
