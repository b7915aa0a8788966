"""One rank's trace as Holistic Trace Analysis 0.5 sees it, for its critical path.

It takes every event with a `stream` argument and a correlation for work of the device, rounds
times to whole microseconds (starts up, ends down) and drops the last profiler step. Those rules are
its own and partly wrong; `observe.analyze.critical_path` does not use them.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwright.errors import InputError, Problem
from meshwright.observe.analyze.spans.intervals import Flags, Ints
from meshwright.timeline.columns import DictionaryColumn
from meshwright.timeline.readers.parsing.arrow_arrays import to_number_array
from meshwright.timeline.timeline import Timeline

BASE_PERIOD_NS = 7_889_238 * 10**9
"""Kineto counts from the last whole quarter of a year of 7889238 s (`ChromeTraceBaseTime`)."""


class HtaTraceRows(NamedTuple):
    """The events that are kept, in the order of the file."""

    ts: Ints
    """Start, µs from the first event."""
    duration: Ints
    """Length, µs; may be negative where an event is shorter than the rounding."""
    name: Ints
    names: Sequence[str]
    category: Ints
    categories: Sequence[str]
    process: Ints
    thread: Ints
    """Host: process and thread; device: GPU and stream. Numbers that sort as theirs do."""
    device: Ints
    stream: Ints
    """The device and the stream among the arguments; -1 where there is none."""
    correlation: Ints
    correlated_row: Ints
    """Row of the event at the other end of the correlation; 0 unknown, -1 none. Rows count from 1,
    so that the number 0 is free."""
    wait_stream: Ints
    event_record: Ints
    """What a synchronization waits for: the stream, and the correlation of the event's record."""

    def match_names(self, *names: str) -> Flags:
        """Which rows have one of these names."""
        wanted = np.array([name in names for name in self.names] + [False])
        found: Flags = wanted[self.name]
        return found

    def match_categories(self, *categories: str) -> Flags:
        """Which rows are of one of these categories."""
        wanted = np.array([name in categories for name in self.categories] + [False])
        found: Flags = wanted[self.category]
        return found


class _Arguments(msgspec.Struct):
    device: int | float | str | None = None
    stream: int | float | str | None = None
    correlation: int | float | str | None = None
    wait_on_stream: int | float | str | None = None
    wait_on_cuda_event_record_corr_id: int | float | str | None = None


_DECODER = msgspec.json.Decoder(_Arguments)


def check_arguments(part: Timeline) -> None:
    """Refuse a timeline that was read without the arguments of launches: figures would be wrong."""
    launches = np.flatnonzero(part.column("flow_out") >= 0)
    known = "extra" in part.spans.column_names
    if launches.size and not (
        known
        and part.spans.column("extra").take(to_number_array(launches)).null_count < launches.size
    ):
        fix = 'read the trace with detail="full"'
        raise InputError([Problem("extra", "does not hold the arguments of launches", fix)])


def build_hta_rows(part: Timeline) -> HtaTraceRows:
    """Return the events of one rank with the figures that the rules need."""
    category, name = part.string_column("category"), part.string_column("name")
    keep = category.codes >= 0
    if "Trace" in category.values:
        keep &= category.codes != list(category.values).index("Trace")
    arguments = _arguments(part, keep)
    ts, duration = _microseconds(part, keep)
    process, thread = _places(part, keep)
    rows = HtaTraceRows(
        ts=ts,
        duration=duration,
        name=name.codes[keep],
        names=tuple(name.values),
        category=category.codes[keep],
        categories=tuple(category.values),
        process=process,
        thread=thread,
        device=arguments["device"],
        stream=arguments["stream"],
        correlation=arguments["correlation"],
        correlated_row=np.minimum(arguments["correlation"], 0),
        wait_stream=arguments["wait_on_stream"],
        event_record=arguments["wait_on_cuda_event_record_corr_id"],
    )
    return rows._replace(correlated_row=_partners(rows))


def mask_device_rows(rows: HtaTraceRows) -> Flags:
    """Which rows it takes for work of the device."""
    found: Flags = ((rows.stream >= 0) & (rows.correlation >= 0)) | rows.match_names(
        "Event Sync", "Context Sync"
    )
    return found


def mask_retained_rows(rows: HtaTraceRows) -> Flags:
    """Which rows it keeps: what the host did before the last profiler step, and its kernels."""
    steps = {name for name in rows.names if "ProfilerStep" in name}
    device = mask_device_rows(rows)
    if len(steps) < 2:
        return np.ones(rows.ts.size, dtype=np.bool_)
    cut = rows.ts[~device & rows.match_names(*steps)].max()
    host: Flags = ~device & (rows.ts < cut)
    return host | (device & np.isin(rows.correlation, rows.correlation[host]))


def _partners(rows: HtaTraceRows) -> Ints:
    """Link launches and device work by correlation; of several, the last of the file."""
    partner = np.minimum(rows.correlation, 0)
    device = mask_device_rows(rows)
    linked = rows.correlation != -1
    for here, there in ((~device & linked, device & linked), (device & linked, ~device & linked)):
        targets = np.flatnonzero(there)
        if not targets.size:
            continue
        order = np.argsort(rows.correlation[targets], kind="stable")
        sorted_ids = rows.correlation[targets][order]
        own = np.flatnonzero(here)
        at = np.searchsorted(sorted_ids, rows.correlation[own], side="right") - 1
        hit = (at >= 0) & (sorted_ids[np.maximum(at, 0)] == rows.correlation[own])
        partner[own[hit]] = targets[order][at[hit]] + 1
    return partner


def _arguments(part: Timeline, keep: Flags) -> dict[str, Ints]:
    texts = part.spans.column("extra").to_pylist() if "extra" in part.spans.column_names else []
    names = _Arguments.__struct_fields__
    found = {name: np.full(int(keep.sum()), -1, dtype=np.int64) for name in names}
    for row, place in enumerate(np.flatnonzero(keep).tolist()):
        text = texts[place] if texts else None
        if not text:
            continue
        try:
            arguments = _DECODER.decode(text)
        except msgspec.MsgspecError:
            continue
        for name in names:
            value = getattr(arguments, name)
            if value is not None:
                found[name][row] = _whole(value)
    return found


def _whole(value: Any) -> int:
    try:
        return int(value)
    except (ValueError, OverflowError):
        return -1


def _microseconds(part: Timeline, keep: Flags) -> tuple[Ints, Ints]:
    """Round as it does: in floating point, starts up and ends down."""
    start = part.column("start_ns")[keep]
    length = part.column("duration_ns")[keep]
    if not start.size:
        return start, length
    base = int(part.metadata.get("base_ns", "-1"))
    if base < 0:
        base = int(start.min()) // BASE_PERIOD_NS * BASE_PERIOD_NS
    if not (np.any(start % 1000) or np.any(length % 1000)):
        return (start - base) // 1000, length // 1000
    # Whole and part apart: ns since 1970 do not fit a float, and neither do HTA's microseconds.
    whole, part_ns = np.divmod(start - base, 1000)
    ts = whole + part_ns / 1000
    end = np.floor(ts + length / 1000).astype(np.int64)
    first = np.ceil(ts).astype(np.int64)
    return first, end - first


def _places(part: Timeline, keep: Flags) -> tuple[Ints, Ints]:
    return (
        _sorted_codes(part.string_column("process"), keep),
        _sorted_codes(part.string_column("lane"), keep),
    )


def _sorted_codes(column: DictionaryColumn, keep: Flags) -> Ints:
    """Codes that sort as the numbers in the texts do."""

    def key(text: str) -> tuple[int, int, str]:
        digits = "".join(character for character in text if character.isdigit())
        return (text.startswith("host"), int(digits or 0), text)

    order = sorted(range(len(column.values)), key=lambda at: key(column.values[at]))
    place = np.zeros(len(column.values) + 1, dtype=np.int64)
    place[order] = np.arange(len(order))
    codes: Ints = place[column.codes[keep]]
    return codes
