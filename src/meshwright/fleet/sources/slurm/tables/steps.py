"""Steps folded into their jobs: peak memory, processor time, what GPUs did.

A step stands behind its job. Steps without their job (a query may ask for them alone, a window may
cut it off) still tell that there was one, so one is made of them.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.fleet.sources.slurm.formats.text_columns import (
    Floats,
    parse_distinct,
    to_arrow,
    to_floats,
)
from meshwright.fleet.sources.slurm.formats.tres import parse_tres

Indexes = npt.NDArray[np.int64]


class JobsWithStepTotals(NamedTuple):
    """Records of jobs alone, and for each what its steps add up to; NaN: not told."""

    jobs: pa.Table
    peak_memory_bytes: Floats
    cpu_s: Floats
    gpu_util: Floats
    peak_gpu_memory_bytes: Floats
    has_batch_step: npt.NDArray[np.bool_]
    """A script ran."""
    has_interactive_step: npt.NDArray[np.bool_]
    """Somebody sat at it: Slurm calls that step `interactive`."""


def fold_steps(records: pa.Table) -> JobsWithStepTotals:
    """Fold steps into the records of their jobs."""
    is_step = np.array(pc.is_valid(records["step"]))
    owner = _owners(records, is_step)
    orphan = is_step & (owner < 0)
    if orphan.any():
        records = _adopt(records, orphan)
        is_step = np.array(pc.is_valid(records["step"]))
        owner = _owners(records, is_step)
    rows = np.flatnonzero(~is_step)
    place = np.full(len(is_step), -1)
    place[rows] = np.arange(len(rows))
    jobs = records.take(rows)
    steps = np.flatnonzero(is_step & (owner >= 0))
    return _sums(jobs, records.take(steps), place[owner[steps]])


def _sums(jobs: pa.Table, steps: pa.Table, of: Indexes) -> JobsWithStepTotals:
    tasks = to_floats(steps["tasks"])
    whole = np.nan_to_num(tasks, nan=1.0)
    memory = to_floats(steps["memory_total"])
    for told in (to_floats(steps["rss_ave"]) * whole, to_floats(steps["rss_max"]) * whole):
        memory = np.where(np.isnan(memory), told, memory)
    util, gpu_memory = to_floats(steps["gpu_util_total"]), to_floats(steps["gpu_memory_total"])
    (gpus,) = parse_distinct(
        steps["alloc"].fill_null(""), lambda text: (parse_tres(text).gpus,), [pa.float64()]
    )
    # Slurm adds the use of all GPUs of a task: 396 of four is 99 % of each. A card that cannot be
    # asked shows noughts for both, which tell nothing.
    with np.errstate(divide="ignore", invalid="ignore"):
        share = util / 100.0 / np.where(to_floats(gpus) > 0, to_floats(gpus), np.nan)
    share = np.where(np.isfinite(share), np.minimum(share, 1.0), np.nan)
    blind = np.nan_to_num(util) + np.nan_to_num(gpu_memory) == 0
    names = np.array(steps["step"].fill_null("").to_numpy(zero_copy_only=False), dtype=object)
    return JobsWithStepTotals(
        jobs,
        _most(jobs.num_rows, of, memory),
        _total(jobs.num_rows, of, to_floats(steps["cpu_s"])),
        _most(jobs.num_rows, of, np.where(blind, np.nan, share)),
        _most(jobs.num_rows, of, np.where(blind, np.nan, gpu_memory)),
        _has(jobs.num_rows, of[names == "batch"]),
        _has(jobs.num_rows, of[names == "interactive"]),
    )


def _most(length: int, of: Indexes, values: Floats) -> Floats:
    known = ~np.isnan(values)
    most = np.full(length, -np.inf)
    np.maximum.at(most, of[known], values[known])
    return np.where(np.isinf(most), np.nan, most)


def _total(length: int, of: Indexes, values: Floats) -> Floats:
    known = ~np.isnan(values)
    total = np.bincount(of[known], values[known], minlength=length)
    result: Floats = np.where(_has(length, of[known]), total, np.nan)
    return result


def _has(length: int, of: Indexes) -> npt.NDArray[np.bool_]:
    has = np.zeros(length, bool)
    has[of] = True
    return has


def _owners(records: pa.Table, is_step: npt.NDArray[np.bool_]) -> Indexes:
    """Return for each step the row of its job: the job before it, or one of the same name."""
    codes = _codes(records)
    rows = np.arange(len(codes))
    before = np.maximum.accumulate(np.where(is_step, -1, rows))
    fits = is_step & (before >= 0)
    fits[fits] = codes[rows[fits]] == codes[before[fits]]
    owner = np.where(fits, before, -1)
    lost = np.flatnonzero(is_step & ~fits)
    jobs = np.flatnonzero(~is_step)
    if len(lost) and len(jobs):
        by_code = jobs[np.argsort(codes[jobs], kind="stable")]
        spot = np.searchsorted(codes[by_code], codes[lost])
        found = spot < len(by_code)
        found[found] = codes[by_code[spot[found]]] == codes[lost[found]]
        owner[lost[found]] = by_code[spot[found]]
    return owner


def _codes(records: pa.Table) -> Indexes:
    """Number the records of the accounting: by Slurm's own index, else by the job's name."""
    name = pc.binary_join_element_wise(
        records["cluster"].fill_null(""), records["id"].fill_null(""),
        records["record"].fill_null(""), "\t",
    )  # fmt: skip
    coded = pc.dictionary_encode(name.combine_chunks())
    return np.array(coded.indices, dtype=np.int64)


def _adopt(records: pa.Table, orphan: npt.NDArray[np.bool_]) -> pa.Table:
    """Put before the records a job for every group of steps that has none."""
    rows = np.flatnonzero(orphan)
    codes = _codes(records)
    steps = records.take(rows)
    # Read twice, a step is still one.
    twice = pc.binary_join_element_wise(
        pc.cast(pa.array(codes[rows]), pa.string()), steps["step"].combine_chunks(), "\t"
    )
    _, first = np.unique(pc.dictionary_encode(twice).indices.to_numpy(), return_index=True)
    keep = np.setdiff1d(np.arange(len(codes)), rows[np.setdiff1d(np.arange(len(rows)), first)])
    rows, steps = rows[np.sort(first)], steps.take(np.sort(first))
    group, place = np.unique(codes[rows], return_inverse=True)
    start, end = to_floats(steps["start_s"]), to_floats(steps["end_s"])
    begun = -_most(len(group), place, -start)
    open_ended = _has(len(group), place[np.isnan(end)])
    ended = np.where(open_ended, np.nan, _most(len(group), place, end))
    widest = _pick(place, -np.nan_to_num(to_floats(steps["num_nodes"])))
    script = np.array(pc.equal(steps["step"], "batch"), dtype=float)
    speaker = _pick(place, -script)
    made = steps.take(widest)
    state = steps["state"].take(speaker)
    state = pc.if_else(pa.array(open_ended & ~np.isnan(begun)), pa.scalar("RUNNING"), state)
    changed = {
        "step": pa.nulls(len(group), pa.string()),
        "state": state,
        "exit": steps["exit"].take(speaker),
        "start_s": to_arrow(begun),
        "end_s": to_arrow(ended),
        "submit_s": pa.nulls(len(group), pa.float64()),  # Slurm gives steps their start
        "eligible_s": pa.nulls(len(group), pa.float64()),
        "name": pa.nulls(len(group), pa.string()),
        "cpu_s": pa.nulls(len(group), pa.float64()),
    }
    for name, values in changed.items():
        place_of = made.schema.get_field_index(name)
        made = made.set_column(place_of, records.schema.field(name), values)
    return pa.concat_tables([made, records.take(keep)])


def _pick(place: Indexes, order: Floats) -> Indexes:
    """Return of every group the row that comes first in an order."""
    sorted_rows = np.lexsort((np.arange(len(place)), order, place))
    _, first = np.unique(place[sorted_rows], return_index=True)
    result: Indexes = sorted_rows[first]
    return result
