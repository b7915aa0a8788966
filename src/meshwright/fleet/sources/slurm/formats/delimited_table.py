"""Tables that Slurm prints with a delimiter (`sacct -P`), as columns of text.

Slurm quotes nothing: a job's name may hold the delimiter, its command line may hold ends of lines.
Lines with the right number of delimiters are read by Arrow, whole blocks at a time; the others are
joined, or cut where their fields come out as times, numbers and states.
"""

import io
import re
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from meshwright.errors import InputError, Problem

BLOCK_BYTES: Final = 32 << 20
_MOST_LINES: Final = 500
"""Of one field; whatever is longer is no field."""
_MOST_SURPLUS: Final = 100
"""Delimiters within fields of one line; more mean that the header is of another table."""
_UNIT: Final = b"\x1f"  # ASCII's own separator of fields, which nobody types
_HEADER = re.compile(rb"[A-Za-z][A-Za-z0-9_:/()%]*")
_FREE: Final = frozenset(
    {"JobName", "Comment", "AdminComment", "SystemComment", "SubmitLine", "WorkDir", "Extra",
     "Constraints", "WCKey", "StdErr", "StdIn", "StdOut", "Container", "Reason", "Account",
     "REASON", "NAME", "COMMENT"}
)  # fmt: skip
_WITH_COMMAS: Final = frozenset(
    {"AllocTRES", "ReqTRES", "TRESUsageInTot", "TRESUsageInAve", "TRESUsageInMax", "NodeList"}
)
"""Fields that hold commas, which may be the delimiter."""
_TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d|\d{9,11}|Unknown|None|N/A|"
_SPAN = r"[\d:.\-]*|UNLIMITED|Partition_Limit|INVALID"
_SHAPES: Final = {
    **dict.fromkeys(("Submit", "Eligible", "Start", "End"), re.compile(_TIME)),
    **dict.fromkeys(
        ("Elapsed", "Planned", "Reserved", "Suspended", "TotalCPU", "Timelimit", "CPUTime",
         "UserCPU", "SystemCPU"), re.compile(_SPAN)
    ),
    **dict.fromkeys(
        ("ElapsedRaw", "NNodes", "AllocNodes", "NCPUS", "AllocCPUS", "DBIndex", "UID", "GID",
         "NTasks", "CPUTimeRAW", "Priority", "Restarts", "QOSRAW"), re.compile(r"\d*")
    ),
    "State": re.compile(r"[A-Z_]+(?: by \S+)?\+?"),
    "ExitCode": re.compile(r"(?:\d+:\d+)?"),
    "JobID": re.compile(r"\d+(?:_\[?[\d,:%\-.]+\]?|\+\d+)?(?:\.\S+)?"),
    "JobIDRaw": re.compile(r"\d+(?:\.\S+)?"),
    **dict.fromkeys(
        ("AllocTRES", "ReqTRES", "TRESUsageInTot", "TRESUsageInAve", "TRESUsageInMax"),
        re.compile(r"(?:[\w/:.\-]+=[^,]*(?:,[\w/:.\-]+=[^,]*)*)?"),
    ),
    **dict.fromkeys(
        ("MaxRSS", "AveRSS", "MaxVMSize", "ReqMem"), re.compile(r"[\d.]*[KMGTP]?[nc]?")
    ),
}  # fmt: skip
"""What fields look like that are not free text; it tells where a broken line has to be cut."""


class DelimitedTable:
    """One such table, read from a stream block by block."""

    def __init__(self, stream: BinaryIO, where: str) -> None:
        self._stream = stream
        self.where = where
        header = _header_line(stream)
        first = _HEADER.match(header)
        rest = header[first.end() :] if first else b""
        found = re.match(rb"[^A-Za-z0-9]+", rest)
        if first is None or (rest and found is None):
            what = "has no line of field names at its top"
            fix = "print it with a header: sacct -P without -n"
            raise InputError([Problem(where, what, fix)])
        self.delimiter = found[0] if found else b"|"
        names = header.split(self.delimiter)
        # `sacct -p` ends every line with the delimiter too.
        self.column_names = [name.decode(errors="replace").strip() for name in names]
        self.num_bad_lines = 0
        """Lines of which nothing could be made."""

    def iter_tables(self, wanted: Sequence[str]) -> Iterator[pa.Table]:
        """Give the wanted columns that there are, as text, in tables of a block each."""
        columns = [name for name in dict.fromkeys(self.column_names) if name and name in wanted]
        if not columns:
            what = f"has none of the fields {', '.join(wanted[:5])}, …"
            raise InputError([Problem(self.where, what, "print it with its header")])
        options = csv.ConvertOptions(
            include_columns=columns,
            column_types=dict.fromkeys(columns, pa.string()),
            strings_can_be_null=False,
        )
        names = [name or f"_{place}" for place, name in enumerate(self.column_names)]
        reading = csv.ReadOptions(column_names=names, block_size=8 << 20)
        parsing = csv.ParseOptions(
            delimiter=_UNIT.decode(), quote_char=False, double_quote=False, ignore_empty_lines=True
        )
        for block in _blocks(self._stream, len(self.column_names) - 1, self.delimiter, self._mend):
            if block and not block.isspace():
                try:
                    table = csv.read_csv(io.BytesIO(block), reading, parsing, options)
                except pa.ArrowInvalid:  # a name in another encoding
                    legible = block.decode(errors="replace").encode()
                    table = csv.read_csv(io.BytesIO(legible), reading, parsing, options)
                # Outputs that were put one behind the other each have their header.
                first = columns[0]
                again = pc.equal(table[first], first)
                yield table.filter(pc.invert(again)) if pc.any(again).as_py() else table

    def _mend(self, lines: list[bytes]) -> list[bytes]:
        """Join and cut lines that have too few or too many delimiters; all are one run of them."""
        mended: list[bytes] = []
        held: list[bytes] = []
        for line in lines:
            held.append(line)
            row = self._cut(b" ".join(held))
            if row is None and len(held) > 1 and (row := self._cut(line)) is not None:
                self.num_bad_lines += 1  # whatever came before it is no part of it
            if row is not None:
                mended.append(row)
            hopeless = len(held) > _MOST_LINES or self._surplus(b"".join(held)) > _MOST_SURPLUS
            if row is not None or hopeless:
                self.num_bad_lines += row is None
                held = []
        self.num_bad_lines += bool(b"".join(held).strip())
        return mended

    def _surplus(self, line: bytes) -> int:
        return line.count(_UNIT) + 1 - len(self.column_names)

    def _cut(self, line: bytes) -> bytes | None:
        """Put surplus fields together in free-text fields, so that the others look right."""
        surplus = self._surplus(line)
        if not 0 <= surplus <= _MOST_SURPLUS:
            return None
        fields = line.decode(errors="replace").split(_UNIT.decode())
        rows = self._cuts(fields, 0, surplus, {})
        return None if rows is None else _UNIT.decode().join(rows).encode()

    def _cuts(
        self, fields: list[str], at: int, surplus: int, failed: dict[tuple[int, int], bool]
    ) -> list[str] | None:
        """Cut the fields from the name at a place on, of which so many more are left than names."""
        if at == len(self.column_names):
            return [] if surplus == 0 else None
        if (at, surplus) in failed:
            return None
        name = self.column_names[at]
        shape = _SHAPES.get(name)
        begin = len(fields) - (len(self.column_names) - at) - surplus
        joins = name in _FREE or (self.delimiter == b"," and name in _WITH_COMMAS)
        for more in range(surplus + 1 if joins else 1):
            value = self.delimiter.decode().join(fields[begin : begin + more + 1])
            if shape is None or shape.fullmatch(value):
                rest = self._cuts(fields, at + 1, surplus - more, failed)
                if rest is not None:
                    return [value, *rest]
        failed[at, surplus] = True
        return None


def _header_line(stream: BinaryIO) -> bytes:
    for _ in range(8):  # warnings may come before it
        line = stream.readline()
        if line.strip() and not line.startswith((b"sacct:", b"slurm_", b"#", b"\xef\xbb\xbf#")):
            return line.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n")
    return b""


def _blocks(
    stream: BinaryIO, most: int, delimiter: bytes, mend: Callable[[list[bytes]], list[bytes]]
) -> Iterator[bytes]:
    """Give blocks of whole lines that all have `most` delimiters, the delimiter being one byte."""
    rest = b""
    while True:
        read = stream.read(BLOCK_BYTES)
        block = rest + read
        if read:
            # A line may begin in the next block: what follows the last good line waits.
            block, rest = _whole(block, delimiter, most)
        if not read and block and not block.endswith(b"\n"):
            block += b"\n"
        if block and delimiter != _UNIT:
            block = block.replace(_UNIT, b" ").replace(delimiter, _UNIT)
        if block:
            yield _checked(block, most, mend)
        if not read:
            return


def _whole(block: bytes, delimiter: bytes, most: int) -> tuple[bytes, bytes]:
    """Cut a block before the last line that has as many delimiters as a line should.

    That line may be continued; whatever stands before it is complete.
    """
    end = block.rfind(b"\n")
    while end > 0:
        start = block.rfind(b"\n", 0, end)
        if block.count(delimiter, start + 1, end) >= most:
            return block[: start + 1], block[start + 1 :]
        end = start
    return b"", block


def _checked(block: bytes, most: int, mend: Callable[[list[bytes]], list[bytes]]) -> bytes:
    data = np.frombuffer(block, np.uint8)
    ends = np.flatnonzero(data == ord("\n"))
    marks = np.flatnonzero(data == _UNIT[0])
    counts = np.diff(np.searchsorted(marks, ends), prepend=0)
    wrong = counts != most
    if not wrong.any():
        return block
    pieces: list[bytes] = []
    starts = np.concatenate(([0], ends[:-1] + 1))
    # Runs of wrong lines are mended together; right ones between them are copied as they are.
    edges = np.flatnonzero(np.diff(np.concatenate(([False], wrong, [False]))))
    done = 0
    for first, after in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        pieces.append(block[done : int(starts[first])])
        stop = int(ends[after - 1]) + 1
        pieces += [row + b"\n" for row in mend(block[int(starts[first]) : stop].splitlines())]
        done = stop
    pieces.append(block[done:])
    return b"".join(pieces)
