"""`TraceBlock`: rows of a foreign table as text, whose faulty values are counted when read."""

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.fleet.columns import Flags, Floats, group_rows, to_floats
from meshwright.fleet.sources.job_checks import MAX_GPUS, find_job_faults
from meshwright.fleet.sources.row_faults import RowFaults, no_rows
from meshwright.fleet.store.schema_check import MAX_TIME_S, list_required_columns

_OTHER_UNIT = 5.0
"""A column this many times as large as it should be is in another unit."""
_OTHER_UNIT_OF_A_ROW = 30.0
"""Published lists have single rows that are off by more, but by less than this."""
_NODE_COUNTS = ("gpu", "gpu_capacity_num", "number of GPUs", "cap_gpu")
_SHORT = 30.0
"""What is shorter than this may differ by rounding."""


class TraceBlock:
    """Some rows of a table, read column by column by the functions of `columns`."""

    def __init__(
        self, rows: pa.Table, faults: RowFaults, first_row: int = 0, zone: str = ""
    ) -> None:
        self._rows = rows
        self.faults = faults
        self.first_row = first_row
        self.zone = zone
        """The zone that the user gave for times without one; empty: none."""
        self.faulty: Flags = no_rows(rows.num_rows)
        """Rows with a fault."""

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        return int(self._rows.num_rows)

    @property
    def column_names(self) -> list[str]:
        """The names of the columns."""
        return list(self._rows.column_names)

    def __getitem__(self, name: str) -> pa.ChunkedArray:
        return self._rows[name]

    def add_fault(self, where: Flags, column: str, what: str, fix: str = "") -> None:
        """Count the rows `where` as faulty."""
        places = np.flatnonzero(where & ~self.faulty)
        self.faulty |= where
        if len(places):
            first = [self._value(column, int(place)) for place in places[:8]]
            self.faults.add(places + self.first_row, column, first, what, fix)

    def _value(self, column: str, place: int) -> object:
        found = self._rows[column][place].as_py() if column in self._rows.column_names else ""
        return "" if found is None else found

    def check_jobs(self, jobs: pa.Table, columns: Mapping[str, Sequence[str]]) -> None:
        """Count jobs made of these rows that cannot be true.

        `columns` names, for each column of `jobs`, the columns of the file that it may come from.
        """
        told = [_floats(jobs[name]) for name in ("submit_s", "start_s", "end_s", "gpus")]
        for fault in find_job_faults(*told):
            self.add_fault(fault.rows, self._origin(columns, fault.column), fault.what, fault.fix)

    def check_unit(self, name: str, *expected: Floats, said: str, every_row: bool = False) -> None:
        """Count rows whose column `name` is in another unit than the columns it follows from.

        `expected` is what it may be. Without `every_row` single rows may differ from it, and only a
        column that is off as a whole is a fault.
        """
        if name not in self.column_names:
            return
        factor = _OTHER_UNIT_OF_A_ROW if every_row else _OTHER_UNIT
        given = to_plain_floats(self._rows[name])
        with np.errstate(invalid="ignore", divide="ignore"):
            ratios = [np.where(one > _SHORT, given / one, np.nan) for one in expected]
            off = np.logical_and.reduce(
                [~((ratio < factor) & (ratio > 1 / factor)) for ratio in ratios]
            )
        known = np.logical_or.reduce([np.isfinite(ratio) for ratio in ratios])
        if not every_row and 2 * int((off & known).sum()) <= int(known.sum()):
            return
        self.add_fault(off & known, name, f"is not {said}", "write all in the units of the trace")

    def _origin(self, columns: Mapping[str, Sequence[str]], ours: str) -> str:
        names = columns.get(ours, ())
        return next((name for name in names if name in self.column_names), ours)

    def check_repeats(self, job: pa.Array) -> None:
        """Count rows that name the same job as a row before them, and say something else."""
        place = group_rows(job)
        first = np.unique(place, return_index=True)[1]
        again = np.ones(len(place), dtype=np.bool_)
        again[first] = False
        if not again.any():
            return
        # The same line twice is one row.
        lines = group_rows(*(self._rows[name] for name in self.column_names))
        differs = again & (lines != lines[first][place])
        names = ("job_id", "job_name", "name", "instance_sn")
        column = next((name for name in names if name in self.column_names), "job")
        what = "names a job of a line before it, with other values"
        self.add_fault(differs, column, what, "give each job an id of its own")

    def filter_sound(self) -> pa.Table:
        """Count the block and return its rows without those that are faulty."""
        self.faults.count_block(self.faulty)
        return self._rows.filter(pa.array(~self.faulty))

    def keep_sound_rows(self, table: str, made: pa.Table) -> pa.Table:
        """Return the rows of a table made of this block without those that are faulty."""
        if "time_s" in made.column_names:
            made = self._drop_far_times(made)
        if table == "nodes" and made.num_rows == self.num_rows:
            with np.errstate(invalid="ignore"):
                many = to_floats(made["gpus"]) > MAX_GPUS
            what = "is more GPUs than any cluster has"
            self.add_fault(many, self._find_count_column(), what, "write the GPUs it has")
        if made.num_rows == self.num_rows and self.faulty.any():
            made = made.filter(pa.array(~self.faulty))
        for key in list_required_columns(table):
            if made[key].null_count:
                made = made.filter(made[key].is_valid())
        return made

    def _find_count_column(self) -> str:
        return next((name for name in self.column_names if name in _NODE_COUNTS), "gpus")

    def _drop_far_times(self, made: pa.Table) -> pa.Table:
        far = np.abs(np.nan_to_num(_floats(made["time_s"]))) > MAX_TIME_S
        if not far.any():
            return made
        if made.num_rows == self.num_rows:
            names = ("time", "Time", "timestamp_anon", "SaveTimeUTC")
            column = next((name for name in names if name in self.column_names), "time_s")
            what = "is no time in seconds since 1970"
            self.add_fault(far, column, what, "divide milliseconds by 1000")
        return made.set_column(
            made.schema.get_field_index("time_s"), made.schema.field("time_s"),
            pa.array(np.where(far, np.nan, _floats(made["time_s"])), from_pandas=True),
        )  # fmt: skip


def to_plain_floats(column: pa.ChunkedArray) -> Floats:
    """Return text as numbers, NaN for what is none."""
    text = pc.utf8_trim_whitespace(column.combine_chunks())
    plain = pc.match_substring_regex(text, r"^[+-]?\d+\.?\d*([eE][+-]?\d+)?$")
    numbers = pc.if_else(plain, text, pa.scalar(None, pa.string())).cast(pa.float64())
    return np.asarray(numbers.to_numpy(zero_copy_only=False), dtype=np.float64)


def _floats(column: pa.ChunkedArray) -> Floats:
    return np.asarray(column.to_numpy(), dtype=np.float64)
