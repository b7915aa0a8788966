"""The file of NCCL's example tuner plugin: rows, reader, writer, and a check for its trap.

Format and behaviour as read in NVIDIA/nccl 2.30.7, plugins/tuner/example/plugin.c and
src/enqueue.cc: 8 to 10 columns, the first row that fits and is possible wins, and its algorithm
costs nothing. The trap: the plugin begins every call with one channel, so a row with -1 channels,
or a call that no row fits, runs on ONE channel and not on NCCL's own number. Where rows come from
is `tuner_rows`.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import NamedTuple, get_args

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.predict.network.nccl_constants import (
    ALGORITHMS,
    PROTOCOLS,
    Algorithm,
    Protocol,
    get_fixed_constants,
)
from meshwright.predict.network.nccl_tuning import NcclOp
from meshwright.spec.field_checks import FieldChecker
from meshwright.spec.name_suggestions import format_suggestion
from meshwright.spec.serialization import format_value

CSV_NAMES: dict[NcclOp, str] = {
    "broadcast": "broadcast",
    "reduce": "reduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_reduce": "allreduce",
}
"""The collectives that NCCL asks a tuner about, as the file writes them."""
TUNED_OPS: tuple[NcclOp, ...] = tuple(CSV_NAMES)
MAX_BYTES = 2**64 - 1
"""The largest size that the file can name: C's size_t."""
COLUMNS = (
    *("collective_type", "min_bytes", "max_bytes", "algorithm", "protocol", "channels"),
    *("nNodes", "nRanks", "numPipeOps", "regBuff"),
)
_REQUIRED = 8
_LONGEST_LINE = 254
"""The plugin reads 256 bytes with the newline and the end; what is over becomes a line itself."""
_OPS_BY_NAME = {name: op for op, name in CSV_NAMES.items()}


class TunerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row: which calls it fits, and what they are to use."""

    op: NcclOp
    min_bytes: int
    max_bytes: int
    """The last size that fits."""
    algorithm: Algorithm
    protocol: Protocol
    channels: int | None
    """How many; None is the file's -1, the trap. 0 leaves the number to NCCL."""
    nodes: int | None = None
    """Nodes of the communicator; None fits any."""
    ranks: int | None = None
    """Ranks of the communicator; None fits any."""
    pipe_ops: int | None = None
    """Operations that NCCL joins into one; None fits any."""
    registered: int | None = None
    """1 for registered buffers, 0 for others; None fits both."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.one_of("op", self.op, TUNED_OPS)
        bounds.one_of("algorithm", self.algorithm, get_args(Algorithm))
        bounds.one_of("protocol", self.protocol, get_args(Protocol))
        for name, size in (("min_bytes", self.min_bytes), ("max_bytes", self.max_bytes)):
            if not 0 <= size <= MAX_BYTES:
                bounds.add(name, f"{size} bytes do not fit 64 bits", f"use 0 to {MAX_BYTES}")
        if self.min_bytes > self.max_bytes:
            what = f"{self.max_bytes} is below min_bytes {self.min_bytes}, so no size fits"
            bounds.add("max_bytes", what, f"use {self.min_bytes} or more")
        most = get_fixed_constants().max_channels
        if self.channels is not None and not 0 <= self.channels <= most:
            bounds.add("channels", f"{self.channels} channels", f"use 1 to {most}")
        bounds.count(1, nodes=self.nodes, ranks=self.ranks)
        bounds.count(0, pipe_ops=self.pipe_ops)
        if self.registered not in (None, 0, 1):
            bounds.add("registered", f"{self.registered} is not 0 or 1", "use 0, 1 or None")
        bounds.raise_problems()

    def matches(self, op: str, nbytes: int, call: "TunerCall") -> bool:
        """Tell whether a call of this size is one the row is for."""
        return (
            self.op == op
            and self.min_bytes <= nbytes <= self.max_bytes
            and self.nodes in (None, call.nodes)
            and self.ranks in (None, call.ranks)
            and self.pipe_ops in (None, call.pipe_ops)
            and self.registered in (None, call.registered)
        )


class TunerCall(NamedTuple):
    """What the plugin knows of a call beside its collective and size."""

    nodes: int
    ranks: int
    pipe_ops: int = 1
    registered: int = 0


def find_matching_row(
    rows: Iterable[TunerRow], op: str, nbytes: int, call: TunerCall
) -> TunerRow | None:
    """Return the row that the plugin applies; None where it leaves one channel and NCCL's choice.

    A row whose algorithm NCCL cannot use for the call is passed over, which is not known here.
    """
    return next((row for row in rows if row.matches(op, nbytes, call)), None)


def write_tuner_csv(rows: Iterable[TunerRow], remarks: Iterable[str] = ()) -> str:
    """Return the rows as a file; `remarks` become comment lines at its head."""
    lines = []
    for remark in (*remarks, ",".join(COLUMNS)):
        words = " ".join(remark.split())
        while words:
            # A comment line that is too long would go on as a row.
            cut = len(words) if len(words) < 120 else words.rfind(" ", 0, 120)
            cut = 120 if cut <= 0 else cut
            lines.append(f"# {words[:cut]}")
            words = words[cut:].strip()
    for row in rows:
        optional = [row.pipe_ops, row.registered]
        while optional and optional[-1] is None:
            optional.pop()
        head = [CSV_NAMES[row.op], row.min_bytes, row.max_bytes, row.algorithm, row.protocol]
        tail = [row.channels, row.nodes, row.ranks, *optional]
        lines.append(",".join(str(-1 if item is None else item) for item in (*head, *tail)))
    return "\n".join([*lines, ""])


def read_tuner_csv(text: str, where: str = "tuner") -> tuple[TunerRow, ...]:
    """Return the rows of a file in their order, or every fault with its line.

    The reader is stricter than the plugin, which skips short lines and takes a name it does not
    know for allreduce, ring or simple without a word.
    """
    return tuple(row for _, row in _numbered_rows(text, where))


def check_tuner_csv(
    text: str,
    where: str = "tuner",
    *,
    shapes: Sequence[tuple[int, int]] = (),
    ops: Sequence[NcclOp] = TUNED_OPS,
) -> tuple[Problem, ...]:
    """Return where a file leaves calls on one channel; nothing where it does not.

    `shapes` are the communicators of the job as (nodes, ranks); left out, those that the file
    names. Communicators of other shapes always run on one channel.
    """
    numbered = _numbered_rows(text, where)
    places = [f"{where}: line {line}" for line, _ in numbered]
    return _traps([row for _, row in numbered], places, where, shapes, ops)


def check_tuner_rows(
    rows: Sequence[TunerRow],
    *,
    shapes: Sequence[tuple[int, int]] = (),
    ops: Sequence[NcclOp] = TUNED_OPS,
) -> tuple[Problem, ...]:
    """Return where rows leave calls on one channel; the arguments are those for a file."""
    places = [f"rows[{index}]" for index in range(len(rows))]
    return _traps(rows, places, "rows", shapes, ops)


def _traps(
    rows: Sequence[TunerRow],
    places: Sequence[str],
    where: str,
    shapes: Sequence[tuple[int, int]],
    ops: Sequence[NcclOp],
) -> tuple[Problem, ...]:
    problems = [
        Problem(
            place,
            "channels -1 means ONE channel, not NCCL's own number",
            "write how many, such as 16, or 0 to leave the number to NCCL",
        )
        for place, row in zip(places, rows, strict=True)
        if row.channels is None
    ]
    wanted: list[tuple[int | None, int | None]] = list(shapes)
    if not wanted:
        wanted = list(dict.fromkeys((row.nodes, row.ranks) for row in rows))
    for op in ops:
        if not any(row.op == op for row in rows):
            what = f"no row is for {CSV_NAMES[op]}, so it runs on ONE channel"
            problems.append(Problem(where, what, f"add rows for {CSV_NAMES[op]}"))
            continue
        for nodes, ranks in wanted:
            problems += _gap(rows, where, op, nodes, ranks)
    return tuple(problems)


def _gap(
    rows: Sequence[TunerRow], where: str, op: NcclOp, nodes: int | None, ranks: int | None
) -> list[Problem]:
    """Name the first size that no row fits, for any number of joined calls and any buffers."""
    # A number that no row names stands for all others, of a shape as well as of joined calls.
    pipes = {-2, *(row.pipe_ops for row in rows if row.pipe_ops is not None)}
    for pipe_ops, registered in product(sorted(pipes), (0, 1)):
        call = TunerCall(
            -2 if nodes is None else nodes, -2 if ranks is None else ranks, pipe_ops, registered
        )
        size = 0
        while size <= MAX_BYTES:
            row = find_matching_row(rows, op, size, call)
            if row is None:
                break
            size = row.max_bytes + 1
        else:
            continue
        starts = [
            row.min_bytes
            for row in rows
            if row.min_bytes > size and row.matches(op, row.min_bytes, call)
        ]
        sizes = f"{size} to {min(starts) - 1} bytes" if starts else f"{size} bytes or more"
        shape = f"{_any(nodes)} nodes and {_any(ranks)} ranks"
        narrow = "" if pipe_ops == -2 else f", {pipe_ops} joined calls"
        buffers = "registered" if registered else "unregistered"
        what = (
            f"{CSV_NAMES[op]} on {shape}: no row fits {sizes} "
            f"({buffers} buffers{narrow}), which run on ONE channel"
        )
        return [Problem(where, what, f"add a row that covers them, up to {MAX_BYTES}")]
    return []


def _any(number: int | None) -> str:
    return "any" if number is None else str(number)


def _numbered_rows(text: str, where: str) -> list[tuple[int, TunerRow]]:
    problems: list[Problem] = []
    rows: list[tuple[int, TunerRow]] = []
    for number, line in enumerate(text.splitlines(), 1):
        place = f"{where}: line {number}"
        if len(line.encode()) > _LONGEST_LINE:
            what = f"the line has {len(line.encode())} bytes; the plugin cuts it at {_LONGEST_LINE}"
            problems.append(Problem(place, what, "shorten it"))
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        row, found = _row(line, place)
        problems += found
        if row is not None:
            rows.append((number, row))
    if problems:
        raise InputError(problems)
    return rows


def _row(line: str, place: str) -> tuple[TunerRow | None, list[Problem]]:
    cells = [cell.strip() for cell in line.split(",")]
    if cells[0] in ("collective_type", "collective"):
        return None, [Problem(place, "the plugin takes a heading for a row", "begin it with #")]
    if not _REQUIRED <= len(cells) <= len(COLUMNS):
        what = f"{len(cells)} columns, where the plugin needs 8, 9 or 10"
        return None, [Problem(place, what, f"write {','.join(COLUMNS)}")]
    if "" in cells:
        what = f"{COLUMNS[cells.index('')]} is empty, and the plugin shifts what follows"
        return None, [Problem(place, what, "write -1 for any")]
    problems: list[Problem] = []
    for index, known, taken in (
        (0, tuple(_OPS_BY_NAME), "allreduce"),
        (3, ALGORITHMS, "ring"),
        (4, PROTOCOLS, "simple"),
    ):
        if cells[index] not in known:
            what = (
                f"{COLUMNS[index]} {format_value(cells[index])}, which the plugin takes for {taken}"
            )
            problems.append(Problem(place, what, format_suggestion(cells[index], known)))
    numbers: dict[str, int | None] = {}
    for index in (1, 2, *range(5, len(cells))):
        try:
            number = int(cells[index])
        except ValueError:
            what = f"{COLUMNS[index]} {format_value(cells[index])} is not a whole number"
            problems.append(Problem(place, what, "write digits alone, or -1 for any"))
            continue
        numbers[COLUMNS[index]] = None if number == -1 and index > 2 else number
    if problems:
        return None, problems
    try:
        row = TunerRow(
            op=_OPS_BY_NAME[cells[0]],
            min_bytes=numbers["min_bytes"] or 0,
            max_bytes=numbers["max_bytes"] or 0,
            algorithm=cells[3],  # type: ignore[arg-type]
            protocol=cells[4],  # type: ignore[arg-type]
            channels=numbers["channels"],
            nodes=numbers["nNodes"],
            ranks=numbers["nRanks"],
            pipe_ops=numbers.get("numPipeOps"),
            registered=numbers.get("regBuff"),
        )
    except InputError as error:
        return None, [Problem(place, f"{p.where}: {p.what}", p.fix) for p in error.problems]
    return row, []
