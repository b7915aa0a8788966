"""Opens a public trace and gives its rows."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from meshwright.errors import InputError, Problem
from meshwright.observe.fleet.sources.public import (
    accounts,
    alibaba,
    pai,
    philly,
    series,
    training_log,
)
from meshwright.observe.fleet.sources.public.files import Part, opened, parts_of
from meshwright.observe.fleet.sources.public.form import Form, Tables, Told, form, recognised
from meshwright.observe.fleet.sources.source import Asked, Batch, some_of

FORMS: Final[tuple[Form, ...]] = (
    *accounts.FORMS, *philly.FORMS, *alibaba.FORMS, *pai.FORMS, *series.FORMS,
)  # fmt: skip
PHILLY_JOBS: Final = form("Philly jobs", "", None, "Philly")
PICKLED_CURVES: Final = form("pickled curves", "", None)
CURVES_OF_FIGURES: Final = form("curves of figures", "", None)
_MOST_ROWS = 250_000
"""Rows of a batch."""
_CLAIMED_FILES = 8
"""Of a folder so many files are looked into before it is said to be none of ours."""
_KNOWN = "Acme, Helios, Philly, Alibaba, Muri, Sia, Chronus, Zhejiang Lab"


class Found(NamedTuple):
    """A part whose form is known."""

    part: Part
    form: Form


def found_in(where: Path) -> Iterator[Found]:
    """Find the parts of known forms in a file or under a folder."""
    for part in parts_of(where):
        known = _form_of(part)
        if known is not None:
            yield known


def _form_of(part: Part) -> Found | None:
    if part.kind == "json":
        with opened(part) as stream:
            head = stream.read(1 << 16)
        if philly.looks_like_jobs(head):
            return Found(part, PHILLY_JOBS)
        return Found(part, CURVES_OF_FIGURES) if b"_cdf_pct" in head else None
    if part.kind == "pickle":
        return Found(part, PICKLED_CURVES)
    if series.side_by_side(part):
        return Found(part, series.SIDE_BY_SIDE)
    known = recognised(part, FORMS)
    if known is None:
        part = pai.with_header(part) if part.kind == "csv" else part
        known = recognised(part, FORMS) or (
            training_log.form_of(part) if part.kind == "csv" else None
        )
    return Found(part, known) if known else None


def named(part: Part) -> str:
    """Return the cluster that a file is of: the first telling word of its name, or its folder."""
    words = [word for word in part.stem.split("_") if word.lower() not in _SAY_NOTHING]
    place = Path(part.member) if part.member and Path(part.member).parent.name else part.path
    name = words[0] if words else place.resolve().parent.name
    return name[:1].upper() + name[1:]


_SAY_NOTHING = frozenset(
    ("all", "cluster", "data", "gpu", "job", "jobs", "list", "log", "number", "table", "trace")
)


def claims(where: str) -> bool:
    """Say whether a path holds a public trace."""
    path = Path(where)
    if "://" in where or not path.exists():
        return False
    try:
        return any(_form_of(part) for part in islice(parts_of(path), _CLAIMED_FILES))
    except InputError:
        return False


def source(where: str, asked: Asked) -> "PublicTrace":
    """Open a trace; say which are known where it is none of them."""
    path = Path(where)
    parts = [(part, _form_of(part)) for part in parts_of(path)]
    known = [one for _, one in parts if one is not None]
    found = [one for one in known if one.form.read or one.form.name in _JOINED]
    if not found and known:
        what = f"holds statistics ({known[0].form.name}), not telemetry"
        raise InputError([Problem(where, what, "hold them against ours with mw validate fleet")])
    if not found:
        what = "holds no public trace that is known here"
        raise InputError([Problem(where, what, f"known are those of {_KNOWN}")])
    read = {one.part.label for one in found}
    unread = tuple(part for part, _ in parts if part.label not in read and _is_table(part))
    return PublicTrace(path, asked, tuple(found), unread)


def _is_table(part: Part) -> bool:
    """Say whether a part is more than a text that lies beside the data."""
    return len(part.columns) > 1 and part.path.suffix not in (".md", ".rst", ".txt", "")


_JOINED = frozenset({PHILLY_JOBS.name, pai.JOB.name, pai.INSTANCE.name, training_log.LOG.name})
"""Forms that take more than one block of one table to read."""


class PublicTrace:
    """The rows of a public trace."""

    def __init__(
        self, where: Path, asked: Asked, found: tuple[Found, ...], unread: tuple[Part, ...] = ()
    ) -> None:
        self._where, self._asked, self._unread = where, asked, unread
        self._found = tuple(one for one in found if not self._repeats(one, found))
        self._left_out = [one for one in found if one not in self._found]
        self._several = Counter((one.form.name, one.part.path.parent) for one in found)

    @property
    def name(self) -> str:
        """What it is and where."""
        return f"public:{self._where}"

    @staticmethod
    def _repeats(one: Found, found: tuple[Found, ...]) -> bool:
        """Say whether a list of nodes is part of another beside it, with other numbers for them."""
        if one.form.name != alibaba.NODES_2023:
            return False
        beside = [
            other.part for other in found
            if other.form == one.form and other.part.path.parent == one.part.path.parent
        ]  # fmt: skip
        return one.part != next((part for part in beside if "all" in part.stem), beside[0])

    def batches(self, cursor: str | None = None) -> Iterator[Batch]:
        """Give the rows part by part; a cursor names the last part that was read to its end."""
        labels = [one.part.label for one in self._found]
        begin = labels.index(cursor) + 1 if cursor in labels else 0
        unread = (self._not_read(),) if self._unread else ()
        for one in self._found[begin:]:
            last: Batch | None = None
            skipped: list[int] = []
            for tables in self._tables(one, skipped):
                for table, whole in tables.items():
                    for rows in _pieces(self._within(table, whole)):
                        if last is not None:
                            yield last
                        last = Batch(table, rows)
            if last is not None:
                left = f"{one.part.label}: {len(skipped):,} rows of a wrong width left out"
                again = [
                    f"{other.part.label} left out: its nodes are in {one.part.label} too, under "
                    "other names"
                    for other in self._left_out
                    if other.part.path.parent == one.part.path.parent
                    and one.form.name == alibaba.NODES_2023
                ]
                notes = (f"read as {one.form.name}", *([left] if skipped else []), *again, *unread)
                unread = ()
                yield last._replace(cursor=one.part.label, notes=notes)

    def _not_read(self) -> str:
        names = [part.member or part.path.name for part in self._unread]
        return f"left out, as no telemetry can be made of it: {some_of(names)}"

    def _tables(self, one: Found, skipped: list[int]) -> Iterator[Tables]:
        part = one.part
        told = Told(self._cluster(one), part.path.stat().st_mtime, part)
        if one.form.name == PHILLY_JOBS.name:
            yield philly.read_jobs(part, told)
        elif one.form.name == training_log.LOG.name:
            yield training_log.read_log(part, self._beside(training_log.PODS), told)
        elif one.form.name == pai.JOB.name:
            beside = pai.Beside(self._beside(pai.TAGS), self._beside(pai.SENSOR))
            yield pai.read_jobs(part, self._other(pai.TASK), beside, told)
        elif one.form.name == pai.INSTANCE.name:
            yield from pai.read_held(part, pai.tasks_of(self._other(pai.TASK)), told)
        elif one.form.read is not None and one.form.whole:
            blocks = list(part.blocks(skipped=skipped))
            if blocks:
                yield one.form.read(pa.concat_tables(blocks), told)
        elif one.form.read is not None:
            rows = 0
            for block in part.blocks(skipped=skipped):
                yield one.form.read(block, told._replace(first_row=rows))
                rows += block.num_rows

    def _beside(self, wanted: Form) -> Part | None:
        """Return another table of the same trace, where there is one."""
        folder = self._where if self._where.is_dir() else self._where.parent
        found = (one.part for one in found_in(folder) if one.form.name == wanted.name)
        return next(found, None)

    def _other(self, wanted: Form) -> Part:
        """Return the table that this one is joined with."""
        found = self._beside(wanted)
        if found is not None:
            return found
        what = f"needs the table of {wanted.name} beside it, which is not there"
        raise InputError([Problem(str(self._where), what, "put it into the same folder")])

    def _cluster(self, one: Found) -> str:
        if self._asked.cluster or one.form.cluster:
            return self._asked.cluster or one.form.cluster
        if one.form.name in _NAMED:
            return named(one.part)
        folder = one.part.path.resolve().parent.name
        many = self._several[one.form.name, one.part.path.parent] > 1
        # Each of several workloads in a folder numbers its jobs from nought. The one that others
        # were made from belongs to the nodes beside it.
        apart = many and one.form.name in _WORKLOADS and not one.part.stem.endswith("default")
        return f"{folder}/{one.part.stem}" if apart else folder

    def _within(self, table: str, rows: pa.Table) -> pa.Table:
        """Leave out what is not of the time that is asked for."""
        since, until = self._asked.since_s, self._asked.until_s
        begin, end = _TIMES.get(table, ("", ""))
        if not begin or (since is None and until is None):
            return rows
        kept = pa.array([True] * rows.num_rows)
        if until is not None:
            kept = pc.and_(kept, pc.fill_null(pc.less(rows[begin], until), True))
        if since is not None:
            kept = pc.and_(kept, pc.fill_null(pc.greater_equal(rows[end], since), True))
        return rows.filter(kept)


def _pieces(rows: pa.Table) -> Iterator[pa.Table]:
    """Cut a table into as many rows as a batch may have; of an empty one there is one."""
    for begin in range(0, max(rows.num_rows, 1), _MOST_ROWS):
        yield rows.slice(begin, _MOST_ROWS)


_TIMES: Final = {
    "jobs": ("submit_s", "end_s"),
    "held": ("start_s", "end_s"),
    "samples": ("time_s", "time_s"),
    "node_samples": ("time_s", "time_s"),
    "nodes": ("since_s", "until_s"),
}
_NAMED: Final = frozenset({"Helios jobs", "jobs", "GPUs by day"})
_WORKLOADS: Final = frozenset(
    {"Muri workload", "Muri run", "Sia workload", "Chronus workload", "Alibaba 2023 pods"}
)
