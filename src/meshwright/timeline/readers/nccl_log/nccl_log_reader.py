"""Reads what NCCL prints with NCCL_DEBUG: communicators, channels, rings, trees, calls, warnings.

Lines of all ranks may be mixed in one file, with whatever else a job prints. A line about channels
does not name its communicator: it belongs to the one that the same thread began to make last. Calls
are printed with NCCL_DEBUG_SUBSYS=COLL. Where lines have times, `nccl_log_to_timeline` makes
moments of the calls; those are when the host asked, not when a GPU worked.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.timeline.readers.nccl_log import nccl_log_lines
from meshwright.timeline.readers.nccl_log.nccl_log_records import (
    ChannelConnection,
    ChannelRing,
    ChannelTree,
    Communicator,
    NcclCall,
    NcclLog,
    NcclWarning,
    ProcessFact,
)
from meshwright.timeline.readers.parsing.communication_names import (
    dtype_bytes,
    normalize_collective,
)
from meshwright.timeline.readers.parsing.compressed_file import TextChunks
from meshwright.timeline.schema import ABSENT, SpanKind, TimelineSource
from meshwright.timeline.timeline import Timeline

MAX_RECORDS = 2_000_000
"""Of each kind; more are counted, not kept."""
_CHUNK_BYTES = 1 << 20
_WHOLE = frozenset({"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"})
"""Collectives whose count is that of one rank's part."""


def read_nccl_log(path: str | Path) -> NcclLog:
    """Read one log.

    Raises `DamagedFile` where its packing breaks off; its `kept` is the log before that.
    `InputError` where no line is NCCL's.
    """
    path = Path(path)
    source = TextChunks(path, _CHUNK_BYTES)
    reading = _Reading()
    for text in _lines(source):
        reading.take(text)
    if not reading.num_lines:
        what = "has no line of NCCL's" + (f"; {source.error}" if source.error else "")
        fix = "name the output of a job that ran with NCCL_DEBUG=INFO"
        raise InputError([Problem(str(path), what, fix)])
    log = reading.log(path)
    if source.error:
        fix = f"use the {reading.num_lines:,} lines before that"
        raise DamagedFile([Problem(str(path), source.error, fix)], kept=log)
    return log


def nccl_log_to_timeline(log: NcclLog) -> Timeline:
    """The calls as moments; `InputError` where there are none, or no line has a time.

    A call's rank is the one that its device has in its process's largest communicator.
    """
    calls = [call for call in log.calls if call.time_ns is not None]
    if not calls:
        what = "has no calls of collectives"
        fix = "record it with NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=INIT,COLL"
        if log.calls:
            what = "has no times"
            fix = "record it with NCCL_DEBUG_TIMESTAMP_LEVELS=ALL"
        raise InputError([Problem(str(log.path), what, fix)])
    ranks = assign_ranks(log)
    dtypes = [call.dtype or None for call in calls]
    spans: dict[str, Any] = {
        "rank": [ranks.get((c.host, c.pid, c.device), max(c.rank, 0)) for c in calls],
        "process": "host",
        "lane": [f"thread {call.tid}" for call in calls],
        "start_ns": [call.time_ns for call in calls],
        "duration_ns": 0,
        "kind": SpanKind.HOST.value,
        "name": [f"nccl{call.name}" for call in calls],
        "collective": [normalize_collective(call.name) for call in calls],
        "group": [call.communicator for call in calls],
        "dtype": dtypes,
        "bytes": [count_call_bytes(call) for call in calls],
        "category": "nccl",
        "extra": [_extra(call) for call in calls],
    }
    notes = [*log.notes, "times of NCCL's log are local ones, read as UTC"]
    left = len(log.calls) - len(calls)
    notes += [f"{left:,} calls without a time were left out"] if left else []
    metadata = {"profiler": "nccl log", "notes": "\n".join(notes)}
    return Timeline.from_columns(spans, source=TimelineSource.MEASURED, metadata=metadata)


def assign_ranks(log: NcclLog) -> dict[tuple[str, int, int], int]:
    """The rank of each host, process and device: that in its largest communicator."""
    largest: dict[tuple[str, int, int], Communicator] = {}
    for one in log.communicators:
        key = (one.host, one.pid, one.device)
        if key not in largest or one.num_ranks > largest[key].num_ranks:
            largest[key] = one
    return {key: min(one.rank, 2**31 - 1) for key, one in largest.items()}


def count_call_bytes(call: NcclCall) -> int:
    """The bytes of the larger of what a call takes and gives; -1 where its type is not known."""
    size = dtype_bytes(call.dtype)
    parts = call.num_ranks if normalize_collective(call.name) in _WHOLE else 1
    whole = call.num_elements * size * parts if size else ABSENT
    return whole if whole < 2**62 else ABSENT


def _extra(call: NcclCall) -> str:
    said: Mapping[str, Any] = {
        "opCount": call.op_count,
        "Group size": call.num_ranks,
        "Root": call.root,
        "Reduction": call.reduction,
    }
    return msgspec.json.encode(said).decode()


def _lines(source: TextChunks) -> Iterator[str]:
    """The lines of a file; of one that is too long, only its start."""
    rest = b""
    for chunk in source:
        *whole, rest = (rest + chunk).split(b"\n")
        rest = rest[: nccl_log_lines.LINE_BYTES]
        for line in whole:
            yield line[: nccl_log_lines.LINE_BYTES].decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


class _Reading:
    """What was read so far."""

    def __init__(self) -> None:
        self.num_lines = 0
        self.version = ""
        self.communicators: dict[tuple[str, int, str], Communicator] = {}
        self.past: list[Communicator] = []
        """Those whose address another one took after them."""
        self.connections: list[ChannelConnection] = []
        self.rings: list[ChannelRing] = []
        self.trees: list[ChannelTree] = []
        self.calls: list[NcclCall] = []
        self.warnings: list[NcclWarning] = []
        self.told: dict[ProcessFact, None] = {}
        self.processes: set[tuple[str, int]] = set()
        self.left: Counter[str] = Counter()
        self._making: dict[nccl_log_lines.LogOrigin, tuple[str, int, str]] = {}
        """By thread: the communicator that it began to make last."""

    def take(self, text: str) -> None:
        """Take one line of the file."""
        if "NCCL " not in text:
            return
        line = nccl_log_lines.parse_line(text)
        if line is None:
            version = nccl_log_lines.VERSION.search(text)
            if version is not None:
                self.num_lines += 1
                self.version = self.version or version[1]
            return
        self.num_lines += 1
        self.processes.add(line.origin[:2])
        if line.level == "WARN":
            origin = line.origin
            warned = NcclWarning(
                origin.host, origin.pid, line.device, line.source, line.message, line.time_ns
            )
            self._keep(self.warnings, warned, "warnings")
        elif line.level == "INFO":
            self._take_message(line)

    def _keep(self, records: list[Any], record: Any, what: str) -> None:
        if len(records) < MAX_RECORDS:
            records.append(record)
        else:
            self.left[what] += 1

    def _take_message(self, line: nccl_log_lines.NcclLogLine) -> None:
        message = line.message
        if "opCount" in message:
            self._take_call(line)
        elif message.startswith(("Channel ", "Ring ", "Trees ")):
            self._take_shape(line)
        elif found := nccl_log_lines.NODES.match(message):
            self._note((*line.origin[:2], found[1]), num_nodes=int(found[2]))
        elif found := nccl_log_lines.CHANNELS.match(message):
            self._note(self._making.get(line.origin), num_channels=int(found[1]))
        elif " comm 0x" in f" {message}":
            self._take_communicator(line)
        elif message.startswith("Init timings"):
            took = nccl_log_lines.TIMINGS.search(message)
            if took is not None:
                self._note(self._making.get(line.origin), init_s=float(took[1]))
        else:
            self._take_told(line)

    def _note(self, key: tuple[str, int, str] | None, **more: Any) -> None:
        """Add to what is known of a communicator, if it is known."""
        known = self.communicators.get(key) if key is not None else None
        if key is not None and known is not None:
            self.communicators[key] = known._replace(**more)

    def _take_told(self, line: nccl_log_lines.NcclLogLine) -> None:
        for subject, form in nccl_log_lines.PROCESS_FACTS:
            if found := form.match(line.message):
                told = ProcessFact(*line.origin[:2], subject, found[1].strip())
                if told not in self.told and len(self.told) >= MAX_RECORDS:
                    self.left["settings"] += 1
                else:
                    self.told[told] = None
                return

    def _take_communicator(self, line: nccl_log_lines.NcclLogLine) -> None:
        found = nccl_log_lines.COMMUNICATOR.search(line.message)
        stage = nccl_log_lines.STAGE.search(line.message)
        if found is None or stage is None:
            return
        address, rank, num_ranks, device, _, bus, id_, parent = found.groups()
        origin = line.origin
        key = (origin.host, origin.pid, address)
        old = self.communicators.get(key)
        if len(self.communicators) >= MAX_RECORDS and old is None:
            self.left["communicators"] += 1
            return
        starts = stage[0].endswith("Init START")
        if old is not None and (starts or old.is_destroyed):
            self._keep(self.past, old, "communicators")
            old = None
        if old is None:
            old = Communicator(
                origin.host,
                origin.pid,
                address,
                id_ or "",
                int(rank),
                int(num_ranks),
                int(device),
                bus,
                parent or "",
                None,
                None,
                is_initialized=False,
                is_destroyed=False,
                init_s=None,
            )
        if starts:
            old = old._replace(init_start_ns=line.time_ns)
            self._making[origin] = key
        elif stage[1] == "Init":
            old = old._replace(
                is_initialized=True, init_complete_ns=line.time_ns, id=old.id or id_ or ""
            )
            self._making.setdefault(origin, key)
        else:
            old = old._replace(is_destroyed=True)
        self.communicators[key] = old

    def _current(self, line: nccl_log_lines.NcclLogLine) -> str:
        """The communicator that a line about channels belongs to."""
        key = self._making.get(line.origin)
        if key is None:
            return ""
        return self.communicators[key].id or key[2]

    def _take_shape(self, line: nccl_log_lines.NcclLogLine) -> None:
        message, current = line.message, self._current(line)
        if found := nccl_log_lines.CONNECTION.match(message):
            channel, _, source, _, target, _, direction, transport = found.groups()
            connection = ChannelConnection(
                current, int(channel), int(source), int(target), direction or "",
                transport.strip(), line.origin.host, line.origin.pid,
            )  # fmt: skip
            self._keep(self.connections, connection, "connections")
        elif found := nccl_log_lines.RING_ORDER.match(message):
            ranks = tuple(int(rank) for rank in found[3].split())
            self._keep(self.rings, ChannelRing(current, int(found[1]), ranks), "rings")
        elif message.startswith("Trees "):
            for tree in nccl_log_lines.TREE.finditer(message):
                channel, *down, rank, up = (int(number) for number in tree.groups())
                self._keep(
                    self.trees, ChannelTree(current, channel, rank, up, tuple(down)), "trees"
                )

    def _take_call(self, line: nccl_log_lines.NcclLogLine) -> None:
        found = nccl_log_lines.COLLECTIVE.match(line.message)
        if found is None:
            return
        name, number, _, _, count, dtype, reduction, root, address, num_ranks, _ = found.groups()
        origin = line.origin
        known = self.communicators.get((origin.host, origin.pid, address))
        call = NcclCall(
            origin.host, origin.pid, origin.tid, known.rank if known else ABSENT,
            (known.id if known else "") or address, name, int(number, 16), int(count),
            _of(nccl_log_lines.DTYPES, int(dtype)),
            _of(nccl_log_lines.REDUCTIONS, int(reduction)), int(root), int(num_ranks),
            known.device if known else line.device, line.time_ns,
        )  # fmt: skip
        self._keep(self.calls, call, "calls")

    def log(self, path: Path) -> NcclLog:
        """What the file says."""
        notes = [
            f"{count:,} {what} more than are kept were left out"
            for what, count in self.left.items()
        ]
        told = list(self.told)
        versions = [one.value for one in told if one.subject == "version"]
        if self.version and not versions and len(self.processes) == 1:
            # Older ones do not say whose version it is.
            told.append(ProcessFact(*next(iter(self.processes)), "version", self.version))
        version = self.version or next(iter(versions), "")
        return NcclLog(
            path, version, (*self.past, *self.communicators.values()),
            tuple(self.connections), tuple(self.rings), tuple(self.trees), tuple(self.calls),
            tuple(self.warnings), tuple(notes), tuple(told),
        )  # fmt: skip


def _of(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else ""
