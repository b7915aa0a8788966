"""The `Timeline` value: what happened on every rank of a run, as columns.

Holds two Arrow tables, spans and counters, whose columns `schema` describes. Knows nothing of
files; `store` reads and writes them, `perfetto` draws them.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.errors import InputError, Problem
from meshwright.spec.name_suggestions import build_unknown_name_problem
from meshwright.timeline.columns import (
    DictionaryColumn,
    add_missing_columns,
    build_table,
    to_dictionary,
    to_numpy,
)
from meshwright.timeline.memo import memoize
from meshwright.timeline.schema import (
    COUNTER_COLUMNS,
    COUNTER_COLUMNS_BY_NAME,
    SPAN_COLUMNS,
    SPAN_COLUMNS_BY_NAME,
    Column,
    SpanKind,
    TimelineSource,
)

Window = tuple[int, int]
"""A half-open interval of time in ns: first moment in, first moment out."""


class Timeline(msgspec.Struct, frozen=True, kw_only=True, eq=False, weakref=True):
    """What happened on every rank: spans and counters, simulated or measured."""

    spans: pa.Table
    """One row per span; an optional column that is null throughout may be left out."""
    counters: pa.Table
    """One row per counter value."""
    source: TimelineSource
    """Whether a simulation or a real run wrote it."""
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    """Free pairs about the run, kept in the files' footers."""
    known_columns: frozenset[str] = frozenset(SPAN_COLUMNS_BY_NAME)
    """Span columns whose values are known; fewer than all where a reader asked for fewer."""

    @classmethod
    def from_columns(
        cls,
        spans: Mapping[str, object],
        counters: Mapping[str, object] | None = None,
        *,
        source: TimelineSource | str,
        metadata: Mapping[str, str] | None = None,
    ) -> Self:
        """Make a timeline of columns: lists, arrays, `DictionaryColumn`, or one value for all.

        -1 stands for "no value" in the optional integer columns. Raises `InputError` with every
        problem of every column.
        """
        problems: list[Problem] = []
        tables = []
        for given, columns, what in (
            (spans, SPAN_COLUMNS_BY_NAME, "spans"),
            (
                counters if counters is not None else _no_rows(COUNTER_COLUMNS_BY_NAME),
                COUNTER_COLUMNS_BY_NAME,
                "counters",
            ),
        ):
            try:
                tables.append(build_table(given, columns, what))
            except InputError as error:
                problems += error.problems
        if source not in set(TimelineSource):
            problems.append(
                build_unknown_name_problem(
                    "source", str(source), [item.value for item in TimelineSource], "source"
                )
            )
        if problems:
            raise InputError(problems)
        return cls(
            spans=tables[0],
            counters=tables[1],
            source=TimelineSource(source),
            metadata=dict(metadata or {}),
        )

    @classmethod
    def empty(cls, source: TimelineSource | str = TimelineSource.UNKNOWN) -> Self:
        """A timeline without spans and counters."""
        return cls.from_columns(_no_rows(SPAN_COLUMNS_BY_NAME), source=source)

    @classmethod
    def concat(cls, timelines: Iterable["Timeline"]) -> "Timeline":
        """Put timelines of one source after another; metadata they disagree on is dropped.

        An unknown source goes with any.
        """
        parts = list(timelines)
        if not parts:
            return cls.empty()
        if len(parts) == 1:
            return parts[0]
        sources = sorted({part.source for part in parts} - {TimelineSource.UNKNOWN})
        if len(sources) > 1:
            fix = "keep them apart and compare them instead"
            raise InputError([Problem("source", f"cannot join {' and '.join(sources)}", fix)])
        agreed = set(parts[0].metadata.items()).intersection(*(p.metadata.items() for p in parts))
        known = frozenset.intersection(*(part.known_columns for part in parts))
        return cls(
            spans=_stack([part.spans for part in parts], SPAN_COLUMNS_BY_NAME, known),
            counters=_stack(
                [part.counters for part in parts],
                COUNTER_COLUMNS_BY_NAME,
                frozenset(COUNTER_COLUMNS_BY_NAME),
            ),
            source=sources[0] if sources else TimelineSource.UNKNOWN,
            metadata=dict(sorted(agreed)),
            known_columns=known,
        )

    @property
    def num_spans(self) -> int:
        """How many spans there are."""
        return int(self.spans.num_rows)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that have spans or counters, in order."""
        return _ranks(self)

    @property
    def extent_ns(self) -> Window:
        """From the first start to the last end of all spans; (0, 0) where there are none."""
        if not self.num_spans:
            return (0, 0)
        start = self.column("start_ns")
        return (int(start.min()), int((start + self.column("duration_ns")).max()))

    def column(self, name: str) -> npt.NDArray[Any]:
        """A number column of the spans as numpy; -1 where an integer has no value."""
        column = self._column(name)
        if column.is_string:
            raise InputError([Problem(name, "holds strings", f"use strings({name!r})")])
        return _numbers(self, column.name)

    def string_column(self, name: str) -> DictionaryColumn:
        """A string column of the spans as codes and distinct values; -1 where there is none."""
        column = self._column(name)
        if not column.is_string:
            raise InputError([Problem(name, "holds numbers", f"use column({name!r})")])
        return _coded(self, column.name)

    def select(
        self,
        *,
        ranks: Collection[int] | None = None,
        kinds: Collection[SpanKind | str] | None = None,
        window_ns: Window | None = None,
    ) -> "Timeline":
        """Keep the spans of these ranks and kinds that touch the window, and its counters."""
        keep: Any = np.ones(self.num_spans, dtype=np.bool_)
        keep_counter: Any = np.ones(self.counters.num_rows, dtype=np.bool_)
        if ranks is not None:
            wanted = np.asarray(sorted(ranks), dtype=np.int64)
            keep &= np.isin(self.column("rank"), wanted)
            keep_counter &= np.isin(
                to_numpy(self.counters, COUNTER_COLUMNS_BY_NAME["rank"]), wanted
            )
        if kinds is not None:
            keep &= match_kinds(self.string_column("kind"), kinds)
        if window_ns is not None:
            keep &= overlaps_window(self.column("start_ns"), self.column("duration_ns"), window_ns)
            time = to_numpy(self.counters, COUNTER_COLUMNS_BY_NAME["time_ns"])
            keep_counter &= (time >= window_ns[0]) & (time < window_ns[1])
        return msgspec.structs.replace(
            self,
            spans=self.spans.filter(pa.array(keep)),
            counters=self.counters.filter(pa.array(keep_counter)),
        )

    def split_by_rank(self) -> Iterator["Timeline"]:
        """One timeline per rank, in the order of ranks; rows keep their order."""
        return iter(_parts(self) or (self,) * len(self.ranks))

    def equals(self, other: "Timeline") -> bool:
        """Whether both say the same, row for row, however the strings are encoded."""
        return (
            (self.source, self.metadata, self.known_columns)
            == (other.source, other.metadata, other.known_columns)
            and _plain(self.spans, SPAN_COLUMNS).equals(_plain(other.spans, SPAN_COLUMNS))
            and _plain(self.counters, COUNTER_COLUMNS).equals(
                _plain(other.counters, COUNTER_COLUMNS)
            )
        )

    def _column(self, name: str) -> Column:
        if name not in SPAN_COLUMNS_BY_NAME:
            raise InputError([build_unknown_name_problem("column", name, SPAN_COLUMNS_BY_NAME)])
        if name not in self.known_columns:
            fix = f"add {name!r} to the columns that are read"
            raise InputError([Problem(name, "was not read from the file", fix)])
        return SPAN_COLUMNS_BY_NAME[name]


@memoize
def _ranks(timeline: Timeline) -> tuple[int, ...]:
    return tuple(sorted({*_distinct(timeline.spans), *_distinct(timeline.counters)}))


def _distinct(table: pa.Table) -> list[int]:
    if "rank" not in table.column_names:
        return []
    found: list[int] = table.column("rank").unique().to_pylist()
    return found


@memoize
def _parts(timeline: Timeline) -> tuple[Timeline, ...]:
    """One timeline per rank; none where there is no more than one."""
    if len(timeline.ranks) < 2:
        return ()
    spans, counters = _by_rank(timeline.spans), _by_rank(timeline.counters)
    return tuple(
        msgspec.structs.replace(
            timeline,
            spans=spans.get(rank, timeline.spans.slice(0, 0)),
            counters=counters.get(rank, timeline.counters.slice(0, 0)),
        )
        for rank in timeline.ranks
    )


@memoize
def _numbers(timeline: Timeline, name: str) -> npt.NDArray[Any]:
    return to_numpy(timeline.spans, SPAN_COLUMNS_BY_NAME[name])


@memoize
def _coded(timeline: Timeline, name: str) -> DictionaryColumn:
    return to_dictionary(timeline.spans, SPAN_COLUMNS_BY_NAME[name])


def match_kinds(kind: DictionaryColumn, kinds: Collection[SpanKind | str]) -> npt.NDArray[np.bool_]:
    """Which rows are of one of these kinds."""
    unknown = sorted(set(map(str, kinds)) - set(SpanKind))
    if unknown:
        known = [item.value for item in SpanKind]
        raise InputError(
            [build_unknown_name_problem("kind", name, known, "kinds") for name in unknown]
        )
    wanted = {str(item) for item in kinds}
    is_wanted = np.array([value in wanted for value in kind.values] + [False], dtype=np.bool_)
    rows: npt.NDArray[np.bool_] = is_wanted[kind.codes]
    return rows


def overlaps_window(
    start_ns: npt.NDArray[Any], duration_ns: npt.NDArray[Any], window_ns: Window
) -> npt.NDArray[np.bool_]:
    """Which spans have a moment inside the window; an instant has the one it starts at."""
    first, last = window_ns
    inside: npt.NDArray[np.bool_] = (start_ns < last) & (
        (start_ns >= first) | (start_ns + duration_ns > first)
    )
    return inside


def _no_rows(columns: Mapping[str, Column]) -> dict[str, list[object]]:
    return {name: [] for name, column in columns.items() if not column.nullable}


def _stack(
    tables: list[pa.Table], columns: Mapping[str, Column], known: frozenset[str]
) -> pa.Table:
    """Tables one after another; a column that only some have is null in the others."""
    present = {name for table in tables for name in table.column_names} & known
    wanted = [column for name, column in columns.items() if name in present]
    return pa.concat_tables(
        [add_missing_columns(table, wanted) for table in tables]
    ).unify_dictionaries()


def _by_rank(table: pa.Table) -> dict[int, pa.Table]:
    """The rows of each rank; a table that is sorted by rank is cut without copying."""
    rank = to_numpy(table, COUNTER_COLUMNS_BY_NAME["rank"])
    if not rank.size:
        return {}
    if np.any(rank[1:] < rank[:-1]):
        order = np.argsort(rank, kind="stable")
        table, rank = table.take(pa.array(order)), rank[order]
    cuts = [0, *(np.flatnonzero(rank[1:] != rank[:-1]) + 1).tolist(), rank.size]
    return {int(rank[begin]): table.slice(begin, end - begin) for begin, end in pairwise(cuts)}


def _plain(table: pa.Table, columns: Iterable[Column]) -> pa.Table:
    """The table with all columns, strings not encoded, in one chunk."""
    whole = add_missing_columns(table, columns)
    arrays = [
        pc.cast(array, pa.string()) if pa.types.is_dictionary(array.type) else array
        for array in whole.columns
    ]
    return pa.table(arrays, names=whole.column_names).combine_chunks()
