"""`FaultLog`: the faulty rows of all files of a trace, and the lines on which they stand."""

import csv
import io
from collections.abc import Iterator, Sequence
from functools import partial

from meshwright.fleet.sources.public_traces.trace_files import TraceTable, open_table
from meshwright.fleet.sources.row_faults import MAX_FAULTY_FRACTION, RowFaults

_SHOWN_LINES = 5


class FaultLog:
    """Faults by file."""

    def __init__(self, max_fraction: float = MAX_FAULTY_FRACTION) -> None:
        self.max_fraction = max_fraction
        self._files: dict[str, tuple[TraceTable, RowFaults]] = {}

    def open(self, table: TraceTable) -> RowFaults:
        """Return what counts the faults of a file."""
        if table.label not in self._files:
            self._files[table.label] = table, RowFaults(table.label, self.max_fraction)
        return self._files[table.label][1]

    def refuse_if_many(self) -> None:
        """Refuse a file of which too many rows are faulty."""
        for table, faults in self._files.values():
            faults.refuse_if_many(partial(find_lines, table))

    def take_notes(self) -> list[str]:
        """Say what was left out and which zones were assumed since this was last asked."""
        files, self._files = self._files, {}
        notes = []
        for table, faults in files.values():
            notes += faults.list_zone_notes()
            notes += faults.list_notes(partial(find_lines, table))
        return notes


def find_lines(table: TraceTable, rows: Sequence[int]) -> dict[int, int]:
    """Return on which line of a file each of some rows stands; of Parquet, its number from 1."""
    if table.kind != "csv":
        return {row: row + 1 for row in rows}
    wanted, found = set(rows), {}
    if wanted:
        for place, line in enumerate(_iter_lines(table, odd=False)):
            if place in wanted:
                found[place] = line
            if place >= max(wanted):
                break
    return found


def find_odd_lines(table: TraceTable) -> list[int]:
    """Return the first lines with too many or too few fields."""
    found: list[int] = []
    for line in _iter_lines(table, odd=True):
        found.append(line)
        if len(found) == _SHOWN_LINES:
            break
    return found


def _iter_lines(table: TraceTable, *, odd: bool) -> Iterator[int]:
    """Yield the first line of each row that has the usual width, or of each that has another."""
    with open_table(table) as raw:
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="replace", newline="")
        reader, line, is_header = csv.reader(text, delimiter=table.delimiter), 1, table.has_header
        try:
            for fields in reader:
                if fields and is_header:
                    is_header = False
                elif fields and (len(fields) != table.width) == odd:
                    yield line
                line = reader.line_num + 1
        except csv.Error:  # a field longer than any table has: the lines after it stay unknown
            return
