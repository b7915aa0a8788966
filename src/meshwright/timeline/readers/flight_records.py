"""What a flight recorder's dump tells: groups, operations, progress, as frozen records."""

from collections.abc import Mapping
from typing import NamedTuple

PENDING = frozenset({"scheduled", "started"})


class Frame(NamedTuple):
    """One line of the stack that enqueued an operation."""

    name: str
    file: str
    line: int


class Group(NamedTuple):
    """A process group, known across ranks by its name and its members."""

    name: str
    description: str
    ranks: tuple[int, ...]

    def __hash__(self) -> int:
        """Hash without the ranks: there may be thousands, and names tell most groups apart."""
        return hash((self.name, self.description, len(self.ranks)))


class Progress(NamedTuple):
    """How far a rank came in a group: numbers of collectives, -1 where not told."""

    enqueued: int
    started: int
    completed: int


class Operation(NamedTuple):
    """One collective or point-to-point operation as one rank saw it."""

    record: int
    group: Group
    name: str
    """Without the library: `all_to_all`, `send`."""
    sequence: int
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
    frames: tuple[Frame, ...]

    @property
    def pending(self) -> bool:
        """Whether the rank had not seen it end."""
        return self.state in PENDING and not self.completed_ns

    @property
    def completed(self) -> bool:
        """Whether the rank saw it end well."""
        return self.state == "completed" or self.completed_ns > 0


class Dump(NamedTuple):
    """What one rank wrote down."""

    rank: int
    path: str
    version: str
    groups: tuple[Group, ...]
    progress: Mapping[Group, Progress]
    operations: tuple[Operation, ...]
    """In the order they were enqueued."""
    written_ns: int = 0
    """When the file was last written, by its file system; 0 where that is not known."""


class Dumps(NamedTuple):
    """The dumps of a job, and what could not be read."""

    dumps: tuple[Dump, ...]
    damaged: Mapping[int, str]
    """Ranks whose file is there but broken, and why."""
    notes: tuple[str, ...]
