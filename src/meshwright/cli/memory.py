"""`mw memory SNAPSHOT`: where GPU memory went, told from PyTorch's CUDA memory snapshot."""

import argparse
from pathlib import Path
from typing import Any

from meshwright.cli.answer import Answer, Note, Text, View, facts, table
from meshwright.cli.parser import add_common
from meshwright.errors import InputError
from meshwright.observe.analyze.memory import DeviceMemory, memory_report, timeline
from meshwright.observe.analyze.memory.growth import FEWEST_STEPS
from meshwright.observe.analyze.memory.peak import Moment
from meshwright.observe.analyze.memory.shortage import Shortage
from meshwright.spec.units import format_bytes
from meshwright.timeline.readers.memory_snapshot import Snapshot, read_memory_snapshot
from meshwright.timeline.readers.trace_formats import mistaken

EXAMPLES = ("mw memory snapshot.pickle", "mw memory snapshot.pickle.gz --json")
_LINES = 8
_SHOWN = 2
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
    snapshot = _read(args.snapshot)
    found = memory_report(snapshot)
    used = [each for each in found if each.totals.reserved_bytes or each.totals.events] or found
    views = [view for each in used for view in _screen(each, many=len(used) > 1)]
    if not snapshot.events.action.size:
        views.append(Note("no history: call torch.cuda.memory._record_memory_history() early"))
    data = {"devices": [_data(snapshot, each) for each in found], "settings": snapshot.settings}
    quiet = tuple(str(each.totals.peak_live_bytes) for each in used)
    code = 1 if any(each.shortages for each in found) else 0
    return Answer("memory/1", data, tuple(views), quiet, code)


def _read(path: str) -> Snapshot:
    """The snapshot; a file of another kind is called by its name."""
    try:
        return read_memory_snapshot(path)
    except InputError:
        other = mistaken(Path(path), "mw memory")
        if other is None:
            raise
        raise InputError([other]) from None


def _screen(memory: DeviceMemory, *, many: bool) -> list[View]:
    sums, pieces = memory.totals, memory.fragmentation
    more = sums.peak_reserved_bytes > sums.reserved_bytes
    head = {
        "device": memory.device if many else None,
        "reserved": f"{format_bytes(sums.reserved_bytes)} in {sums.segments:,} segments"
        + (f" (at most {format_bytes(sums.peak_reserved_bytes)})" if more else ""),
        "in use": f"{format_bytes(sums.active_bytes)} in "
        f"{sums.blocks:,} blocks (requested {format_bytes(sums.requested_bytes)})",
        "peak": f"{format_bytes(sums.peak_allocated_bytes)}"
        + (f" (before the recording {format_bytes(sums.live_at_start_bytes)})" if sums.events
           else ""),
        "never freed": f"{format_bytes(sums.never_freed_bytes)} of {sums.never_freed:,} "
        f"allocations, of {sums.allocs:,} recorded"
        if sums.events
        else None,
        "free": f"{format_bytes(pieces.cached_bytes)} cached in whole segments, "
        f"{format_bytes(pieces.stranded_bytes)} stranded beside what is in use "
        f"(largest block {format_bytes(pieces.largest_free_bytes)})"
        + (f", {format_bytes(pieces.private_free_bytes)} in private pools (CUDA graphs)"
           if pieces.private_free_bytes else ""),
        "growth": _growth(memory),
    }  # fmt: skip
    views: list[View] = [facts(head)]
    for each in memory.shortages[:_SHOWN]:
        views.append(_shortage(each))
        views += _moment(each.live, "live when it failed")
    if len(memory.shortages) > _SHOWN:
        views.append(Note(f"{len(memory.shortages)} requests failed: --json lists them"))
    if not any(each.live.live_bytes == memory.peak.live_bytes for each in memory.shortages):
        views += _moment(memory.peak, "at the peak")
    views += _leaks(memory)
    advice = _advice(memory)
    if advice:
        views.append(Text("\n".join(f"next: {line}" for line in advice)))
    return views


def _growth(memory: DeviceMemory) -> str | None:
    grown = memory.growth
    if grown.steps < FEWEST_STEPS:
        return None
    return f"{format_bytes(grown.bytes_per_step)} a step over {grown.steps} steps (by {grown.how})"


def _moment(moment: Moment, title: str) -> list[View]:
    whole = max(1, moment.live_bytes)
    kinds = [
        (name, format_bytes(size), f"{100 * size / whole:.0f} %")
        for name, size in sorted(moment.by_category, key=lambda pair: -pair[1])
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
        (
            format_bytes(leak.bytes_per_step),
            f"{leak.count_per_step:g}",
            format_bytes(leak.total_bytes),
            leak.line,
        )
        for leak in leaks[:_LINES]
    ]
    columns = "bytes a step, tensors a step, held now, line"
    return [
        table(columns, rows, "kept step after step",
              right="bytes a step, tensors a step, held now", wide="line")
    ]  # fmt: skip


def _shortage(short: Shortage) -> View:
    return facts(
        {
            "asked": f"{format_bytes(short.asked_bytes)} at {short.line}",
            "live": f"{format_bytes(short.live.live_bytes)} (below)",
            "allocator had": f"{format_bytes(short.reserved_bytes)} reserved, of it "
            f"{format_bytes(short.free_bytes)} free in pieces, the largest "
            f"{format_bytes(short.largest_free_bytes)}",
            "driver had": format_bytes(short.device_free_bytes) + _limit(short),
            "would have fitted": _fitted(short),
            "room is held by": ", ".join(short.frees_enough[:3]),
        },
        "out of memory",
    )


def _limit(short: Shortage) -> str:
    if not short.is_limited:
        return " free"
    low, high = format_bytes(short.capacity_bytes), format_bytes(short.capacity_below_bytes)
    return (
        f" free: a limit of this process held it back, between {low} and {high} "
        "(torch.cuda.set_per_process_memory_fraction)"
    )


def _fitted(short: Shortage) -> str:
    least = " at least" if short.is_limited else ""
    found = f"a request of {format_bytes(short.fits_bytes)}{least}"
    if short.would_fit_unfragmented:
        return found + "; this one, had free memory been in one piece: fragmentation failed it"
    if short.fitting_share is not None and short.fitting_share < 1:
        return (
            found + f"; or this one with {100 * short.fitting_share:.0f} % of the batch: "
            f"{format_bytes(short.scaling_bytes)} grow with it"
        )
    return found + "; too much else was live for this one"


def _advice(memory: DeviceMemory) -> list[str]:
    found = []
    sums, pieces = memory.totals, memory.fragmentation
    if any(each.would_fit_unfragmented for each in memory.shortages):
        found.append(f"{_EXPANDABLE} joins free pieces: the failed request would have fitted")
    elif memory.shortages:
        found.append(_less(memory.shortages[0]))
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


def _less(short: Shortage) -> str:
    """Say what to make smaller after a request that nothing but less memory would have served."""
    kinds = dict(short.live.by_category)
    largest = max(kinds, key=lambda name: kinds[name])
    share = short.fitting_share
    batch = f"a batch of {100 * share:.0f} %, " if share and share < 1 else ""
    means = {
        "activations": f"{batch}recompute activations (torch.utils.checkpoint)",
        "temporary": f"{batch}smaller pieces of the largest operation",
        "parameters": "shard parameters (FSDP: fully_shard) or use a lower precision",
        "gradients": "shard gradients (ZeRO 2, fully_shard)",
        "optimizer": "shard the optimizer's state (ZeRO 1) or keep it in 8 bits",
        "unknown": f"{batch}record from the start to see what holds the rest",
    }
    return f"{format_bytes(short.lacking_bytes)} were lacking: {means[largest]}"


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
