"""Parts of a rank's timeline: what some steps did, and what is needed to compare ranks.

Both keep whole rows, so every analysis works on what they return.
"""

import re
from collections.abc import Collection

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.errors import InputError, Problem
from meshwright.observe.analyze.spans import DEVICE_KINDS, Flags, device_spans, where
from meshwright.observe.analyze.steps import launch_rows, launch_starts, on_host, steps_of
from meshwright.policy.pipeline.spans import LANE
from meshwright.timeline.schema import ABSENT, Kind
from meshwright.timeline.timeline import Timeline, has_kind

_NEEDED = (
    "rank", "process", "lane", "start_ns", "duration_ns", "kind", "name", "flow_out", "flow_in",
    "bytes", "collective", "group", "dtype", "stage", "microbatch", "category", "extra",
)  # fmt: skip
_MARKS = re.compile(
    r"^ProfilerStep|^Optimizer\.step#|(?i:data_?loader|enumerate\(|__next__|next_data|load_batch)"
)
"""Steps, and where the host loads data: what `stragglers` reads of the host."""


def of_steps(part: Timeline, numbers: Collection[int]) -> Timeline:
    """What these steps of one rank did: their host spans, and the device work they launched.

    Use `Extent.ALL` on it: the steps are whole, so nothing has to be left out.
    """
    marks = [step for step in steps_of(part).steps if step.number in set(numbers)]
    if not marks:
        known = ", ".join(str(step.number) for step in steps_of(part).steps) or "none"
        what = f"has no step {', '.join(map(str, sorted(numbers)))}"
        rank = f"rank {part.ranks[0]}" if part.ranks else "the trace"
        raise InputError([Problem(rank, what, f"name some of its steps: {known}")])
    start = part.column("start_ns")
    spans = device_spans(part)
    moment = start.copy()
    launched = launch_starts(part, spans)
    # Device work belongs to the step that launched it; without a launch, to when it ran.
    moment[spans.row] = np.where(launched != ABSENT, launched, spans.start)
    keep = np.zeros(part.num_spans, dtype=np.bool_)
    for step in marks:
        keep |= (moment >= step.start_ns) & (moment < step.end_ns)
    return _rows(part, keep)


def for_comparing(part: Timeline, *, only_collectives: bool = False) -> Timeline:
    """The rows of one rank that comparing ranks needs: device work, its launches, marks of steps.

    Arguments stay with collectives only. With `only_collectives` compute goes too: the collectives
    can be matched, but not why a rank came late.
    """
    names, kinds = part.strings("name"), part.strings("kind")
    host = on_host(part)
    talks = has_kind(kinds, [Kind.COMMUNICATION])
    keep = talks | (host & where(names, _MARKS.search))
    keep |= where(part.strings("lane"), lambda lane: lane.startswith(LANE))
    if not only_collectives:
        spans = device_spans(part)
        launch = launch_rows(part, spans)
        keep |= has_kind(kinds, DEVICE_KINDS)
        keep[launch[launch != ABSENT]] = True
    chosen = part.spans.select([name for name in _NEEDED if name in part.spans.column_names])
    chosen = chosen.filter(pa.array(keep))
    if "extra" in chosen.column_names:
        place = chosen.column_names.index("extra")
        texts = chosen.column("extra").combine_chunks()
        none = pa.scalar(None, type=texts.type)
        kept = pc.if_else(pa.array(talks[keep]), texts, none)
        chosen = chosen.set_column(place, chosen.schema.field("extra"), kept)
    return msgspec.structs.replace(
        part, spans=_compact(chosen), counters=part.counters.slice(0, 0), known=part.known
    )


def with_rank(part: Timeline, rank: int) -> Timeline:
    """The same timeline under another rank."""
    place = part.spans.column_names.index("rank")
    column = pa.array(np.full(part.num_spans, rank, dtype=np.int32))
    spans = part.spans.set_column(place, part.spans.schema.field(place), column)
    return msgspec.structs.replace(part, spans=spans, counters=part.counters.slice(0, 0))


def _rows(part: Timeline, keep: Flags) -> Timeline:
    return msgspec.structs.replace(part, spans=part.spans.filter(pa.array(keep)))


def _compact(table: pa.Table) -> pa.Table:
    """The table without the labels that no row has any more."""
    columns = []
    for column in table.columns:
        whole = column.combine_chunks()
        if pa.types.is_dictionary(whole.type):
            plain = whole.cast(whole.type.value_type)
            whole = plain.dictionary_encode().cast(whole.type)
        columns.append(whole)
    return pa.table(columns, schema=table.schema)
