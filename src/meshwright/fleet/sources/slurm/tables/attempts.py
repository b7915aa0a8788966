"""Which records are attempts of the same job, and which stand for several elements of an array."""

import re
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.fleet.sources.slurm.formats.hostlist import expand_array
from meshwright.fleet.sources.slurm.formats.text_columns import Floats, to_floats

Indexes = npt.NDArray[np.int64]
_MANY = re.compile(r"(\d+)_\[(.*)\]")


def expand_elements(jobs: pa.Table) -> tuple[Indexes, pa.Array, int]:
    """Return which record every element comes from, its name, and how many lists were cut off.

    Slurm keeps the elements of an array that have not started in one record, `71_[1-4]`: each of
    them asks for what the record asks for.
    """
    names = jobs["id"].combine_chunks()
    rows = np.arange(len(names))
    many = np.flatnonzero(np.array(pc.fill_null(pc.match_substring(names, "["), False)))
    if not len(many):
        return rows, names, 0
    repeats = np.ones(len(names), np.int64)
    texts = names.to_pylist()
    cut = 0
    for row in many.tolist():
        found = _MANY.fullmatch(texts[row])
        tasks = expand_array(found[2]) if found else None
        if found is None or tasks is None:
            cut += 1
            texts[row] = [texts[row].partition("_")[0]]
            continue
        texts[row] = [f"{found[1]}_{task}" for task in tasks]
        repeats[row] = len(tasks)
    spread = [name for text in texts for name in (text if isinstance(text, list) else (text,))]
    return np.repeat(rows, repeats), pa.array(spread, pa.string()), cut


class SlurmAttempts(NamedTuple):
    """Which records count."""

    rows: Indexes
    """Those that do, in the order in which they came."""
    attempt: Indexes
    """Which attempt each is, counted from nought."""
    source_row: Indexes
    """For every record the place in `rows` of the one that counts in its stead, or its own."""


def number_attempts(
    clusters: pa.Array, names: pa.Array, jobs: pa.Table, restarts: Floats,
    ended: npt.NDArray[np.bool_],
) -> SlurmAttempts:  # fmt: skip
    """Tell attempts of jobs apart.

    A requeued job is submitted anew, so records of one job are told apart by when they were
    submitted and started; of records that say the same of both, one that has ended counts, then
    the last. Slurm's own count of restarts holds where it tells records apart: earlier ones may
    not be at hand.
    """
    joined = pc.binary_join_element_wise(clusters, names, "\t")
    codes = np.array(pc.dictionary_encode(joined).indices, dtype=np.int64)
    if not len(codes):
        return SlurmAttempts(codes, codes, codes)
    submit = np.nan_to_num(to_floats(jobs["submit_s"]), nan=-1.0)
    start, restarts, waits = _shared(codes, submit, to_floats(jobs["start_s"]), restarts)
    order = np.lexsort((np.arange(len(codes)), ended, ~waits, start, submit, codes))
    new = _changes(codes[order], submit[order], start[order])
    last = np.append(new[1:], True)
    rows = order[last]
    counted = _count(codes[rows], restarts[rows])
    back = np.argsort(rows, kind="stable")
    place = np.empty_like(back)
    place[back] = np.arange(len(back))
    told_by = np.empty_like(order)
    told_by[order] = place[np.cumsum(new) - 1]
    return SlurmAttempts(rows[back], counted[back], told_by)


def fill_from_parents(table: pa.Table, found: SlurmAttempts) -> pa.Table:
    """Return the rows that count, with what they leave out filled in from those they stand for."""
    rows = table.take(found.rows)
    if len(found.rows) == table.num_rows:
        return rows
    spare = np.ones(table.num_rows, bool)
    spare[found.rows] = False
    spares = np.flatnonzero(spare)
    for place, name in enumerate(table.column_names):
        holes = np.array(pc.is_null(rows[name]))
        if not holes.any():
            continue
        valid = spares[np.array(pc.is_valid(table[name]))[spares]]
        source = np.full(len(found.rows), -1)
        source[found.source_row[valid]] = valid
        source = np.where(holes & (source >= 0), source, found.rows)
        rows = rows.set_column(place, table.schema.field(name), table[name].take(pa.array(source)))
    return rows


def _shared(
    codes: Indexes, submit: Floats, start: Floats, restarts: Floats
) -> tuple[Floats, Floats, npt.NDArray[np.bool_]]:
    """Let records of one submission share when it started and what is told of restarts.

    Also say which of them are from before it started, and so count less than the others.
    """
    order = np.lexsort((submit, codes))
    new = _changes(codes[order], submit[order])
    group, first = np.cumsum(new) - 1, np.flatnonzero(new)
    shared = []
    for values in (start, restarts):
        most = np.maximum.reduceat(np.nan_to_num(values[order], nan=-1.0), first)[group]
        told = np.empty_like(values)
        told[order] = most
        shared.append(told)
    waits = np.isnan(start)
    return (
        np.where(waits, shared[0], start),
        np.where(shared[1] < 0, np.nan, shared[1]),
        waits & (shared[0] >= 0),
    )


def _changes(*columns: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Say where sorted rows differ from the row before."""
    new = np.zeros(len(columns[0]), bool)
    new[0] = True
    for column in columns:
        new[1:] |= column[1:] != column[:-1]
    return new


def _count(codes: Indexes, restarts: Floats) -> Indexes:
    first = np.concatenate(([True], codes[1:] != codes[:-1]))
    rank = np.arange(len(codes)) - np.maximum.accumulate(np.where(first, np.arange(len(codes)), 0))
    told = np.where(np.isnan(restarts), -1, restarts).astype(np.int64)
    # Restarts must grow from record to record; where they do not, their order counts.
    bad = (told < 0) | (~first & (told <= np.concatenate(([-1], told[:-1]))))
    wrong = np.isin(codes, np.unique(codes[bad]))
    result: Indexes = np.where(wrong, rank, told)
    return result
