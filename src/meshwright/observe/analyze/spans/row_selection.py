"""Parts of a rank's timeline: what some steps did, and what is needed to compare ranks.

Both keep whole rows, so every analysis works on what they return.
"""

import re
from collections.abc import Collection
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from meshwright.errors import InputError, Problem
from meshwright.observe.analyze.spans.analysis_extent import CHOSEN_STEPS_KEY
from meshwright.observe.analyze.spans.device_spans import DEVICE_KINDS, find_device_spans
from meshwright.observe.analyze.spans.intervals import Flags, Ints, match_values
from meshwright.observe.analyze.spans.steps import (
    find_launch_rows,
    find_launch_starts,
    find_rank_steps,
    mask_host_rows,
)
from meshwright.policy.pipeline.pass_spans import LANE
from meshwright.timeline.readers.parsing.arrow_arrays import (
    build_arrow_table,
    take_rows,
    to_bool_array,
    to_dictionary_array,
    to_number_array,
)
from meshwright.timeline.schema import ABSENT, SPAN_COLUMNS_BY_NAME, Column, SpanKind
from meshwright.timeline.timeline import Timeline, match_kinds

_NEEDED = (
    "rank", "process", "lane", "start_ns", "duration_ns", "kind", "name", "flow_out", "flow_in",
    "bytes", "collective", "group", "dtype", "stage", "microbatch", "layer", "category", "extra",
)  # fmt: skip
_MARKS = re.compile(
    r"^ProfilerStep|^Optimizer\.step#|(?i:data_?loader|enumerate\(|__next__|next_data|load_batch)"
)
"""Steps, and where the host loads data: what `stragglers` reads of the host."""


@lru_cache(1 << 16)
def _is_mark(name: str) -> bool:
    return _MARKS.search(name) is not None


def select_steps(part: Timeline, numbers: Collection[int]) -> Timeline:
    """What these steps of one rank did: their host spans, and the device work they launched.

    The steps are whole, so nothing of it is left out by any analysis. They must follow each other:
    what lies between them would count as idle.
    """
    every = find_rank_steps(part).steps
    chosen = [place for place, step in enumerate(every) if step.number in set(numbers)]
    rank = f"rank {part.ranks[0]}" if part.ranks else "the trace"
    if not chosen:
        known = ", ".join(str(step.number) for step in every) or "none"
        what = f"has no step {', '.join(map(str, sorted(numbers)))}"
        raise InputError([Problem(rank, what, f"name some of its steps: {known}")])
    marks = every[chosen[0] : chosen[-1] + 1]
    if len(marks) > len(chosen):
        left_out = ", ".join(str(step.number) for step in marks if step.number not in set(numbers))
        what = f"has step {left_out} between those named, whose time would count as idle"
        raise InputError([Problem(rank, what, "name steps that follow each other, such as 3-5")])
    start = part.column("start_ns")
    spans = find_device_spans(part)
    moment = start.copy()
    launched = find_launch_starts(part, spans)
    # Device work belongs to the step that launched it; without a launch, to when it ran.
    moment[spans.row] = np.where(launched != ABSENT, launched, spans.start)
    keep = np.zeros(part.num_spans, dtype=np.bool_)
    for step in marks:
        keep |= (moment >= step.start_ns) & (moment < step.end_ns)
    whole = {**part.metadata, CHOSEN_STEPS_KEY: ",".join(str(step.number) for step in marks)}
    return msgspec.structs.replace(_rows(part, keep), metadata=whole)


def select_comparison_rows(part: Timeline, *, only_collectives: bool = False) -> Timeline:
    """The rows of one rank that comparing ranks needs: device work, its launches, marks of steps.

    Arguments stay with collectives only. With `only_collectives` compute goes too: the collectives
    can be matched, but not why a rank came late.
    """
    names, kinds = part.string_column("name"), part.string_column("kind")
    host = mask_host_rows(part)
    talks = match_kinds(kinds, [SpanKind.COMMUNICATION])
    keep = talks | (host & match_values(names, _is_mark))
    keep |= match_values(part.string_column("lane"), lambda lane: lane.startswith(LANE))
    if not only_collectives:
        spans = find_device_spans(part)
        launch = find_launch_rows(part, spans)
        keep |= match_kinds(kinds, DEVICE_KINDS)
        keep[launch[launch != ABSENT]] = True
    rows = np.flatnonzero(keep)
    known = [name for name in _NEEDED if name in part.spans.column_names]
    arrays = {
        name: _taken(part, SPAN_COLUMNS_BY_NAME[name], rows) for name in known if name != "extra"
    }
    if "extra" in known:
        arrays["extra"] = _texts(part, rows, talks[rows])
    return msgspec.structs.replace(
        part,
        spans=build_arrow_table(arrays, SPAN_COLUMNS_BY_NAME),
        counters=part.counters.slice(0, 0),
    )


def renumber_rank(part: Timeline, rank: int) -> Timeline:
    """The same timeline under another rank."""
    place = part.spans.column_names.index("rank")
    column = to_number_array(np.full(part.num_spans, rank, dtype=np.int32))
    spans = part.spans.set_column(place, part.spans.schema.field(place), column)
    return msgspec.structs.replace(part, spans=spans, counters=part.counters.slice(0, 0))


def _rows(part: Timeline, keep: Flags) -> Timeline:
    return msgspec.structs.replace(part, spans=part.spans.filter(to_bool_array(keep)))


def _taken(part: Timeline, column: Column, rows: Ints) -> Any:
    """Some rows of a column; of labels, only those that they have."""
    if not column.is_string:
        return to_number_array(part.column(column.name)[rows], nullable=column.nullable)
    coded = part.string_column(column.name)
    codes = coded.codes[rows]
    used = np.flatnonzero(np.bincount(codes[codes >= 0], minlength=1))
    number = np.full(len(coded.values) + 1, ABSENT, dtype=np.int32)
    number[used] = np.arange(used.size)
    return to_dictionary_array(number[codes], [coded.values[code] for code in used.tolist()])


def _texts(part: Timeline, rows: Ints, wanted: Flags) -> Any:
    """The arguments of the wanted ones of these rows, and none for the others."""
    texts = take_rows(part.spans.column("extra"), rows[wanted])
    place = np.where(wanted, np.cumsum(wanted) - 1, ABSENT)
    return texts.take(to_number_array(place, nullable=True))
