"""Formats the events of one rank as Chrome trace-event JSON, column by column.

Each function returns an Arrow array of strings, one per event, each opening with the comma that
parts it from the one before. Knows the trace-event format; does not know files or other ranks.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshwright.timeline.columns import to_dictionary, to_numpy
from meshwright.timeline.perfetto.flow_arrows import FlowArrows
from meshwright.timeline.perfetto.track_rows import Ints, TrackLayout, assign_rows
from meshwright.timeline.schema import COUNTER_COLUMNS_BY_NAME, SPAN_COLUMNS_BY_NAME
from meshwright.timeline.timeline import Timeline

# Attributes that go together, so that each group has few combinations in a run: what it is, where
# it belongs, how much it is.
_GROUPS = (
    ("category", "collective", "group", "dtype"),
    ("stage", "microbatch", "layer"),
    ("bytes", "extra"),
)


class SharedText(NamedTuple):
    """A part of each event that is equal in many of them."""

    texts: Any
    """The distinct texts, as an Arrow array."""
    text_index: Ints
    """Index into the texts, for each span."""


class TrackName(NamedTuple):
    """A lane of a rank."""

    title: str
    """What is drawn: without the process where a rank has only one."""
    process: str
    lane: str


class RankEvents(NamedTuple):
    """The spans of one rank in drawing order, ready to be formatted."""

    rank: int
    thread_ids: list[int]
    threads: list[TrackName]
    """What each thread draws, by number; one lane may need several."""
    thread_index: Ints
    """Index into the threads, for each span."""
    start_offset_ns: Ints
    """Start of each span, counted from the trace's first moment."""
    duration_ns: Ints
    shared_texts: list[SharedText]
    """All that is written of a span before its times."""
    flow_arrows: FlowArrows | None
    """The flow ends to draw."""


def number_lanes(part: Timeline) -> tuple[Ints, list[TrackName]]:
    """A number for each span's lane, counted by first appearance, and the lanes."""
    process, lane = part.string_column("process"), part.string_column("lane")
    width = max(len(lane.values), 1)
    found = pa.array(process.codes.astype(np.int64) * width + lane.codes).dictionary_encode()
    pairs = [divmod(key, width) for key in found.dictionary.to_pylist()]
    alone = len({first for first, _ in pairs}) <= 1
    lanes = [
        TrackName(
            lane.values[second] if alone else f"{process.values[first]}: {lane.values[second]}",
            process.values[first],
            lane.values[second],
        )
        for first, second in pairs
    ]
    return found.indices.to_numpy(), lanes


def build_rank_events(
    part: Timeline, base_ns: int, first_thread: int, arrows: FlowArrows | None
) -> RankEvents:
    """Lay out the spans of one rank; its threads are numbered from `first_thread`."""
    (rank,) = part.ranks
    lane, lanes = number_lanes(part)
    start, duration = part.column("start_ns"), part.column("duration_ns")
    placed = assign_rows(lane, start, duration)
    thread, threads = _threads(placed, lanes)
    thread_ids = [first_thread + number for number in range(len(threads))]
    return RankEvents(
        rank=rank,
        thread_ids=thread_ids,
        threads=threads,
        thread_index=thread,
        start_offset_ns=start[placed.order] - base_ns,
        duration_ns=duration[placed.order],
        shared_texts=_pieces(part, placed.order, thread, thread_ids),
        flow_arrows=arrows,
    )


def format_metadata_events(events: RankEvents) -> Any:
    """Metadata events: the names and the order of the rank and its threads."""
    pid = events.rank
    lines = [
        _meta("process_name", pid, None, {"name": f"rank {pid}"}),
        _meta("process_sort_index", pid, None, {"sort_index": pid}),
    ]
    for number, (tid, lane) in enumerate(zip(events.thread_ids, events.threads, strict=True)):
        # Perfetto refuses an empty thread name; of process and lane our own reader makes use.
        place = {"process": lane.process, "lane": lane.lane}
        lines.append(_meta("thread_name", pid, tid, {"name": lane.title or "(no name)", **place}))
        lines.append(_meta("thread_sort_index", pid, tid, {"sort_index": number}))
    return pa.array(lines, pa.string())


def format_span_events(events: RankEvents, rows: slice) -> Any:
    """Complete events of some spans, each followed by its flow events."""
    since, duration = events.start_offset_ns[rows], events.duration_ns[rows]
    lines = pc.binary_join_element_wise(
        *(piece.texts.take(pa.array(piece.text_index[rows])) for piece in events.shared_texts),
        *_microseconds(since, _BEFORE_DURATION),
        *_microseconds(duration, _END),
        "",
    )
    if events.flow_arrows is None:
        return lines
    first, last = np.searchsorted(
        events.flow_arrows.position, [rows.start, rows.start + since.size]
    )
    if first == last:
        return lines
    flows = _flow_lines(events, slice(first, last))
    # Flow events bind to the span that was read last, so each goes right after its own.
    beside = 2 * (events.flow_arrows.position[first:last] - rows.start) + 1
    order = np.argsort(np.concatenate([2 * np.arange(since.size), beside]), kind="stable")
    return pa.concat_arrays([lines, flows]).take(pa.array(order))


def format_counter_events(part: Timeline, events: RankEvents, base_ns: int) -> Any:
    """Counter events; Perfetto names each track by the counter's name and unit."""
    table = part.counters
    name, unit = (
        to_dictionary(table, COUNTER_COLUMNS_BY_NAME["name"]),
        to_dictionary(table, COUNTER_COLUMNS_BY_NAME["unit"]),
    )
    since = to_numpy(table, COUNTER_COLUMNS_BY_NAME["time_ns"]) - base_ns
    tid = events.thread_ids[0] if events.thread_ids else events.rank
    heads = [
        _open({"ph": "C", "name": text, "pid": events.rank, "tid": tid}) + ',"ts":'
        for text in name.values
    ]
    units = [f',"args":{{{msgspec.json.encode(text or "value").decode()}:' for text in unit.values]
    return pc.binary_join_element_wise(
        pa.array(heads, pa.string()).take(pa.array(name.codes)),
        *_microseconds(since, _FRACTION),
        pa.array(units, pa.string()).take(pa.array(unit.codes)),
        pc.cast(table.column("value").combine_chunks(), pa.string()),
        "}}",
        "",
    )


def _meta(name: str, pid: int, tid: int | None, args: Mapping[str, object]) -> str:
    event = {"ph": "M", "name": name, "pid": pid, "args": args}
    return _open(event if tid is None else {**event, "tid": tid}) + "}"


def _open(event: Mapping[str, object]) -> str:
    """An event as JSON that more fields can follow."""
    return ",\n" + msgspec.json.encode(event).decode()[:-1]


def _threads(placed: TrackLayout, lanes: list[TrackName]) -> tuple[Ints, list[TrackName]]:
    """A number for the thread of each span, and what each thread draws."""
    rows = int(placed.row.max(initial=0)) + 1
    key = placed.lane.astype(np.int64) * rows + placed.row
    is_used = np.bincount(key) > 0
    thread = (np.cumsum(is_used) - 1)[key]
    threads = []
    for lane, row in (divmod(int(used), rows) for used in np.flatnonzero(is_used)):
        title = lanes[lane].title + (f" (overlap {row})" if row else "")
        threads.append(lanes[lane]._replace(title=title))
    return thread, threads


def _pieces(part: Timeline, order: Ints, thread: Ints, thread_ids: list[int]) -> list[SharedText]:
    """What is written of each span before its times: name and thread, then its attributes."""
    which, example = _distinct([thread, _codes(part, "name")[order], _codes(part, "kind")[order]])
    table = part.spans.take(pa.array(order[example]))
    heads = [
        _open({"ph": "X", "name": name, "cat": kind, "pid": rank, "tid": thread_ids[number]})
        + ',"args":{'
        for name, kind, rank, number in zip(
            *(table.column(name).to_pylist() for name in ("name", "kind", "rank")),
            thread[example],
            strict=True,
        )
    ]
    pieces = [SharedText(pa.array(heads, pa.string()), which)]
    follows = np.zeros(order.size, dtype=np.int64)  # Whether an attribute was written already.
    written: list[str] = []
    has = np.zeros(order.size, dtype=np.int64)  # Which of those written a span has, one bit each.
    for group in _GROUPS:
        present = [name for name in group if name in part.spans.column_names]
        if not present:
            continue
        codes = [_codes(part, name)[order] for name in present]
        which, example = _distinct([has if "extra" in present else follows, *codes])
        table = part.spans.select(present).take(pa.array(order[example]))
        taken = [
            {name for at, name in enumerate(written) if bits >> at & 1} for bits in has[example]
        ]
        pieces.append(SharedText(pa.array(_attributes(table, taken), pa.string()), which))
        for name, code in zip(present, codes, strict=True):
            has |= (code > 0).astype(np.int64) << len(written)
            written.append(name)
        follows = (has > 0).astype(np.int64)
    return [*pieces, SharedText(pa.array(['},"ts":']), np.zeros(order.size, dtype=np.int32))]


def _attributes(table: pa.Table, taken: list[set[str]]) -> list[str]:
    """The members of `args` for each row, opening with a comma where some were written before."""
    texts = []
    for row, before in zip(table.to_pylist(), taken, strict=True):
        args = {key: value for key, value in row.items() if value is not None}
        if "extra" in args:
            # What the profiler said of a thing that a column tells would stand there twice.
            said = _object(args.pop("extra"))
            args = {**{key: said[key] for key in said if key not in before}, **args}
        text = msgspec.json.encode(args).decode()[1:-1]
        texts.append("," + text if text and before else text)
    return texts


def _distinct(columns: list[Ints]) -> tuple[Ints, Ints]:
    """A number for each combination of the codes in a row, and one row that has each."""
    key = np.zeros(columns[0].size, dtype=np.int64)
    size = 1
    for codes in columns:
        width = int(codes.max(initial=0)) + 1
        if size * width > 2**62:
            key = pa.array(key).dictionary_encode().indices.to_numpy().astype(np.int64)
            size = int(key.max(initial=0)) + 1
        key = key * width + codes
        size *= width
    which = pa.array(key).dictionary_encode().indices.to_numpy()
    example = np.empty(int(which.max(initial=-1)) + 1, dtype=np.int64)
    example[which[::-1]] = np.arange(which.size)[::-1]
    return which, example


def _codes(part: Timeline, name: str) -> Ints:
    """Small numbers that differ where the column differs; 0 is no value."""
    if SPAN_COLUMNS_BY_NAME[name].is_string:
        return part.string_column(name).codes.astype(np.int64) + 1
    encoded = part.spans.column(name).combine_chunks().dictionary_encode()
    indices = encoded.indices.fill_null(-1) if encoded.null_count else encoded.indices
    codes: Ints = indices.to_numpy().astype(np.int64) + 1
    return codes


def _object(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {"extra": text}


def _flow_lines(events: RankEvents, which: slice) -> Any:
    """Flow events: `s` where an arrow begins, `f` where it ends."""
    assert events.flow_arrows is not None
    position, ids, begins, turned = (column[which] for column in events.flow_arrows)
    kinds = [
        _open({**phase, "name": name, "cat": "flow", "pid": events.rank, "tid": tid}) + ',"id":'
        for tid in events.thread_ids
        for name in ("flow", "flow that ends first")
        for phase in ({"ph": "s"}, {"ph": "f", "bp": "e"})
    ]
    kind = events.thread_index[position] * 4 + 2 * turned + ~begins
    return pc.binary_join_element_wise(
        pa.array(kinds, pa.string()).take(pa.array(kind)),
        pc.cast(pa.array(ids), pa.string()),
        ',"ts":',
        *_microseconds(events.start_offset_ns[position], _END),
        "",
    )


def _microseconds(times_ns: Ints, endings: Any) -> tuple[Any, Any]:
    """Whole microseconds as text, and the part after the point with what follows it."""
    whole, rest = np.divmod(times_ns, 1000)
    return pc.cast(pa.array(whole), pa.string()), endings.take(pa.array(rest))


def _endings(after: str) -> Any:
    """For each number of nanoseconds below 1000, its digits after the point and `after`."""
    return pa.array([(f".{rest:03d}" if rest else "") + after for rest in range(1000)], pa.string())


_FRACTION = _endings("")
_BEFORE_DURATION = _endings(',"dur":')
_END = _endings("}")
