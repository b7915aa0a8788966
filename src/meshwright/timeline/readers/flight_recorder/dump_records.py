"""What a flight recorder's dump tells: groups, operations, progress, as frozen records."""

from collections.abc import Mapping
from typing import NamedTuple

PENDING_STATES = frozenset({"scheduled", "started"})


class StackFrame(NamedTuple):
    """One line of the stack that enqueued an operation."""

    name: str
    file: str
    line: int


class RecordedGroup(NamedTuple):
    """A process group, known across ranks by its name and its members."""

    name: str
    description: str
    ranks: tuple[int, ...]

    def __hash__(self) -> int:
        """Hash without the ranks: there may be thousands, and names tell most groups apart."""
        return hash((self.name, self.description, len(self.ranks)))


class GroupProgress(NamedTuple):
    """How far a rank came in a group: numbers of collectives, -1 where not told."""

    last_enqueued: int
    last_started: int
    last_completed: int


class RecordedOperation(NamedTuple):
    """One collective or point-to-point operation as one rank saw it."""

    record_id: int
    group: RecordedGroup
    name: str
    """Without the library: `all_to_all`, `send`."""
    sequence_id: int
    """Number of the collective within its group; of a point-to-point operation, its own count."""
    is_p2p: bool
    source: int
    destination: int
    """Ranks of the job, -1 for collectives and where not told."""
    state: str
    created_ns: int
    started_ns: int
    completed_ns: int
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    timeout_ms: int
    frames: tuple[StackFrame, ...]

    @property
    def is_pending(self) -> bool:
        """Whether the rank had not seen it end."""
        return self.state in PENDING_STATES and not self.completed_ns

    @property
    def is_completed(self) -> bool:
        """Whether the rank saw it end well."""
        return self.state == "completed" or self.completed_ns > 0


class FlightRecorderDump(NamedTuple):
    """What one rank wrote down."""

    rank: int
    path: str
    version: str
    groups: tuple[RecordedGroup, ...]
    progress: Mapping[RecordedGroup, GroupProgress]
    operations: tuple[RecordedOperation, ...]
    """In the order they were enqueued."""
    file_modified_ns: int = 0
    """When the file was last written, by its file system; 0 where that is not known."""


class DumpSet(NamedTuple):
    """The dumps of a job, and what could not be read."""

    dumps: tuple[FlightRecorderDump, ...]
    damaged: Mapping[int, str]
    """Ranks whose file is there but broken, and why."""
    notes: tuple[str, ...]
