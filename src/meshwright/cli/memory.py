"""`mw memory SNAPSHOT`: where GPU memory went, told from PyTorch's CUDA memory snapshot."""

import argparse
from typing import Any

from meshwright.cli.answer import Answer, Note, Text, View, facts, table
from meshwright.cli.parser import add_common
from meshwright.observe.analyze.memory import DeviceMemory, memory_report, timeline
from meshwright.observe.analyze.memory.peak import Moment
from meshwright.observe.analyze.memory.shortage import Shortage
from meshwright.spec.units import format_bytes
from meshwright.timeline.readers.memory_snapshot import Snapshot, read_memory_snapshot

EXAMPLES = ("mw memory snapshot.pickle", "mw memory snapshot.pickle.gz --json")
_LINES = 8
_EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the flags."""
    parser.usage = "mw memory SNAPSHOT [flags]"
    parser.add_argument(
        "snapshot", metavar="SNAPSHOT",
        help="file of torch.cuda.memory._dump_snapshot, may be compressed by gzip",
    )  # fmt: skip
    add_common(parser)


def run(args: argparse.Namespace) -> Answer:
    """Answer with each device's memory; exit code 1 where a request failed."""
    snapshot = read_memory_snapshot(args.snapshot)
    found = memory_report(snapshot)
    used = [each for each in found if each.totals.reserved_bytes or each.totals.events] or found
    views = [view for each in used for view in _screen(each, many=len(used) > 1)]
    if not snapshot.events.action.size:
        views.append(Note("no history: call torch.cuda.memory._record_memory_history() early"))
    data = {"devices": [_data(snapshot, each) for each in found], "settings": snapshot.settings}
    quiet = tuple(str(each.totals.peak_live_bytes) for each in used)
    code = 1 if any(each.shortages for each in found) else 0
    return Answer("memory/1", data, tuple(views), quiet, code)


def _screen(memory: DeviceMemory, *, many: bool) -> list[View]:
    sums, pieces = memory.totals, memory.fragmentation
    head = {
        "device": memory.device if many else None,
        "reserved": f"{format_bytes(sums.reserved_bytes)} in {sums.segments:,} segments",
        "in use": f"{format_bytes(sums.active_bytes)} in "
        f"{sums.blocks:,} blocks (requested {format_bytes(sums.requested_bytes)})",
        "peak": f"{format_bytes(sums.peak_live_bytes)}"
        + (f" (at the start {format_bytes(sums.live_at_start_bytes)})" if sums.events else ""),
        "never freed": f"{format_bytes(sums.never_freed_bytes)} of {sums.never_freed:,} "
        f"allocations, of {sums.allocs:,} recorded"
        if sums.events
        else None,
        "free, stranded": f"{format_bytes(pieces.stranded_bytes)} in segments still in use; "
        f"largest free block {format_bytes(pieces.largest_free_bytes)}",
        "free, cached": f"{format_bytes(pieces.cached_bytes)} in whole segments",
        "growth": _growth(memory),
    }
    views: list[View] = [facts(head)]
    views += [_shortage(each) for each in memory.shortages[:2]]
    views += _moment(memory.peak, "at the peak")
    views += _leaks(memory)
    advice = _advice(memory)
    if advice:
        views.append(Text("\n".join(f"next: {line}" for line in advice)))
    return views


def _growth(memory: DeviceMemory) -> str | None:
    grown = memory.growth
    if grown.steps < 1:
        return None
    return f"{format_bytes(grown.bytes_per_step)} a step over {grown.steps} steps (by {grown.how})"


def _moment(moment: Moment, title: str) -> list[View]:
    whole = max(1, moment.live_bytes)
    kinds = [
        (name, format_bytes(size), f"{100 * size / whole:.0f} %")
        for name, size in moment.by_category
        if size
    ]
    lines = [
        (format_bytes(each.size_bytes), f"{each.tensors:,}", each.category, each.line)
        for each in moment.sources[:_LINES]
    ]
    return [
        table("memory, bytes, share", kinds, title, right="bytes, share"),
        table("bytes, tensors, memory, line", lines, right="bytes, tensors", wide="line"),
    ]


def _leaks(memory: DeviceMemory) -> list[View]:
    leaks = memory.growth.leaks
    if not leaks:
        return []
    rows = [
        (format_bytes(leak.bytes_per_step), f"{leak.count_per_step:g}", leak.steps, leak.line)
        for leak in leaks[:_LINES]
    ]
    columns = "bytes a step, tensors a step, steps, line"
    return [
        table(columns, rows, "kept step after step",
              right="bytes a step, tensors a step, steps", wide="line")
    ]  # fmt: skip


def _shortage(short: Shortage) -> View:
    return facts(
        {
            "asked": f"{format_bytes(short.asked_bytes)} at {short.line}",
            "driver had": format_bytes(short.device_free_bytes),
            "allocator had": f"{format_bytes(short.free_bytes)} free in pieces, the largest "
            f"{format_bytes(short.largest_free_bytes)}",
            "lacking": format_bytes(short.lacking_bytes),
            "in one piece": "would have fitted: fragmentation failed it"
            if short.would_fit_unfragmented
            else "would not have fitted either: too much was live",
            "room is held by": ", ".join(short.frees_enough[:3]),
        },
        "out of memory",
    )


def _advice(memory: DeviceMemory) -> list[str]:
    found = []
    sums, pieces = memory.totals, memory.fragmentation
    if any(each.would_fit_unfragmented for each in memory.shortages):
        found.append(f"{_EXPANDABLE} joins free pieces: the failed request would have fitted")
    elif pieces.stranded_bytes > sums.reserved_bytes / 10 and not pieces.is_expandable:
        found.append(
            f"{_EXPANDABLE} lets {format_bytes(pieces.stranded_bytes)} of stranded memory be reused"
        )
    if pieces.pinned_segments and pieces.stranded_bytes > sums.reserved_bytes / 10:
        found.append(
            f"or max_split_size_mb: {format_bytes(pieces.pinned_by_bytes)} in use pin "
            f"{pieces.pinned_segments} segments that are half free"
        )
    if memory.growth.leaks:
        found.append(f"let go of what {memory.growth.leaks[0].line} keeps each step")
    unknown = dict(memory.peak.by_category)["unknown"]
    if unknown > memory.peak.live_bytes / 2:
        found.append(
            "call torch.cuda.memory._record_memory_history() before the model is made: "
            f"{format_bytes(unknown)} of the peak have no stack"
        )
    return found


def _data(snapshot: Snapshot, memory: DeviceMemory) -> dict[str, Any]:
    return {
        "device": memory.device,
        **memory.totals._asdict(),
        "peak": _moment_data(memory.peak),
        "growth": memory.growth._asdict()
        | {"leaks": [leak._asdict() for leak in memory.growth.leaks]},
        "fragmentation": memory.fragmentation._asdict(),
        "shortages": [
            each._asdict() | {"live": _moment_data(each.live)} for each in memory.shortages
        ],
        "timeline": [
            {"time_us": at, "live_bytes": size} for at, size in timeline(snapshot, memory.live)
        ],
    }


def _moment_data(moment: Moment) -> dict[str, Any]:
    return {
        "live_bytes": moment.live_bytes,
        "time_us": moment.time_us,
        "before_recording_bytes": moment.before_recording_bytes,
        "by_category": dict(moment.by_category),
        "sources": [each._asdict() for each in moment.sources[:50]],
        "largest": [each._asdict() for each in moment.largest],
    }
