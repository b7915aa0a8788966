"""Which records are attempts of the same job, and which stand for several elements of an array."""

import re
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.observe.fleet.sources.slurm.columns import Floats, floats
from meshwright.observe.fleet.sources.slurm.hostlist import tasks_of

Indexes = npt.NDArray[np.int64]
_MANY = re.compile(r"(\d+)_\[(.*)\]")


def elements(jobs: pa.Table) -> tuple[Indexes, pa.Array, int]:
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
        tasks = tasks_of(found[2]) if found else None
        if found is None or tasks is None:
            cut += 1
            texts[row] = [texts[row].partition("_")[0]]
            continue
        texts[row] = [f"{found[1]}_{task}" for task in tasks]
        repeats[row] = len(tasks)
    spread = [name for text in texts for name in (text if isinstance(text, list) else (text,))]
    return np.repeat(rows, repeats), pa.array(spread, pa.string()), cut


class Attempts(NamedTuple):
    """Which records count."""

    rows: Indexes
    """Those that do, in the order in which they came."""
    attempt: Indexes
    """Which attempt each is, counted from nought."""
    told_by: Indexes
    """For every record the place in `rows` of the one that counts in its stead, or its own."""


def attempts(
    clusters: pa.Array, names: pa.Array, jobs: pa.Table, restarts: Floats,
    ended: npt.NDArray[np.bool_],
) -> Attempts:  # fmt: skip
    """Tell attempts of jobs apart.

    A requeued job is submitted anew, so records of one job are told apart by when they were
    submitted and started; of records that say the same of both, one that has ended counts, then
    the last. Slurm's own count of restarts holds where it tells records apart: earlier ones may
    not be at hand.
    """
    joined = pc.binary_join_element_wise(clusters, names, "\t")
    codes = np.array(pc.dictionary_encode(joined).indices, dtype=np.int64)
    submit = np.nan_to_num(floats(jobs["submit_s"]), nan=-1.0)
    start = np.nan_to_num(floats(jobs["start_s"]), nan=np.inf)
    order = np.lexsort((np.arange(len(codes)), ended, start, submit, codes))
    keep = _newest(codes[order], submit[order], start[order])
    told = _shared(codes[order], submit[order], restarts[order])
    rows = order[keep]
    counted = _count(codes[rows], told[keep])
    back = np.argsort(rows, kind="stable")
    place = np.empty_like(back)
    place[back] = np.arange(len(back))
    told_by = np.empty_like(order)
    # A record that does not count stands before the one that does, or waits and stands behind it.
    after = np.minimum(np.concatenate(([0], np.cumsum(keep)[:-1])), max(0, len(rows) - 1))
    before = np.maximum(np.cumsum(keep) - 1, 0)
    waits = (
        ~keep
        & np.isinf(start[order])
        & (codes[order] != codes[rows[after]] if len(rows) else False)
    )
    behind = ~keep & (codes[order] == codes[rows[before]]) & (submit[order] == submit[rows[before]])
    told_by[order] = place[np.where(waits | (behind & np.isinf(start[order])), before, after)]
    return Attempts(rows[back], counted[back], told_by)


def completed(table: pa.Table, found: Attempts) -> pa.Table:
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
        source[found.told_by[valid]] = valid
        source = np.where(holes & (source >= 0), source, found.rows)
        rows = rows.set_column(place, table.schema.field(name), table[name].take(pa.array(source)))
    return rows


def _newest(codes: Indexes, submit: Floats, start: Floats) -> npt.NDArray[np.bool_]:
    """Keep the last of equal records; one that waits is the same as one that started since."""
    keep = np.ones(len(codes), bool)
    same = (codes[1:] == codes[:-1]) & (submit[1:] == submit[:-1])
    twice = same & ((start[1:] == start[:-1]) | np.isinf(start[1:]))
    # Sorted by start, the one that waits comes last; otherwise the newer comes last.
    waits = twice & np.isinf(start[1:]) & ~np.isinf(start[:-1])
    keep[1:][waits] = False
    keep[:-1][twice & ~waits] = False
    return keep


def _shared(codes: Indexes, submit: Floats, restarts: Floats) -> Floats:
    """Let records of one submission share what one of them tells of restarts."""
    if not len(codes):
        return restarts
    new = np.concatenate(([True], (codes[1:] != codes[:-1]) | (submit[1:] != submit[:-1])))
    most = np.maximum.reduceat(np.nan_to_num(restarts, nan=-1.0), np.flatnonzero(new))
    told = most[np.cumsum(new) - 1]
    return np.where(told < 0, np.nan, told)


def _count(codes: Indexes, restarts: Floats) -> Indexes:
    if not len(codes):
        return codes
    first = np.concatenate(([True], codes[1:] != codes[:-1]))
    rank = np.arange(len(codes)) - np.maximum.accumulate(np.where(first, np.arange(len(codes)), 0))
    told = np.where(np.isnan(restarts), -1, restarts).astype(np.int64)
    # Restarts must grow from record to record; where they do not, their order counts.
    bad = (told < 0) | (~first & (told <= np.concatenate(([-1], told[:-1]))))
    wrong = np.isin(codes, np.unique(codes[bad]))
    result: Indexes = np.where(wrong, rank, told)
    return result
