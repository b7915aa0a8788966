"""`mw memory SNAPSHOT`: where GPU memory went, told from PyTorch's CUDA memory snapshot."""

import argparse
from pathlib import Path
from typing import Any

from meshwright.cli.parser import add_common
from meshwright.cli.result import CommandResult, NoteView, TextView, View, make_fields, make_table
from meshwright.errors import InputError
from meshwright.observe.analyze.memory import (
    DeviceMemoryReport,
    analyze_memory,
    downsample_live_bytes,
)
from meshwright.observe.analyze.memory.memory_growth import MIN_STEPS
from meshwright.observe.analyze.memory.memory_peak import LiveMemory
from meshwright.observe.analyze.memory.oom_report import OutOfMemoryReport
from meshwright.spec.units import format_bytes
from meshwright.timeline.readers.memory_snapshot.memory_snapshot_reader import (
    MemorySnapshot,
    read_memory_snapshot,
)
from meshwright.timeline.readers.trace_formats import check_format

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


def run(args: argparse.Namespace) -> CommandResult:
    """Answer with each device's memory; exit code 1 where a request failed."""
    snapshot = _read(args.snapshot)
    found = analyze_memory(snapshot)
    used = [each for each in found if each.totals.reserved_bytes or each.totals.num_events] or found
    views = [view for each in used for view in _screen(each, many=len(used) > 1)]
    if not snapshot.events.action.size:
        views.append(NoteView("no history: call torch.cuda.memory._record_memory_history() early"))
    data = {
        "devices": [_data(snapshot, each) for each in found],
        "settings": snapshot.allocator_settings,
    }
    quiet = tuple(str(each.totals.peak_live_bytes) for each in used)
    code = 1 if any(each.oom_reports for each in found) else 0
    return CommandResult("memory/2", data, tuple(views), quiet, code)


def _read(path: str) -> MemorySnapshot:
    """The snapshot; a file of another kind is called by its name."""
    try:
        return read_memory_snapshot(path)
    except InputError:
        other = check_format(Path(path), "mw memory")
        if other is None:
            raise
        raise InputError([other]) from None


def _screen(memory: DeviceMemoryReport, *, many: bool) -> list[View]:
    sums, pieces = memory.totals, memory.fragmentation
    more = sums.peak_reserved_bytes > sums.reserved_bytes
    head = {
        "device": memory.device if many else None,
        "reserved": f"{format_bytes(sums.reserved_bytes)} in {sums.num_segments:,} segments"
        + (f" (at most {format_bytes(sums.peak_reserved_bytes)})" if more else ""),
        "in use": f"{format_bytes(sums.active_bytes)} in "
        f"{sums.num_blocks:,} blocks (requested {format_bytes(sums.requested_bytes)})",
        "peak": f"{format_bytes(sums.peak_allocated_bytes)}"
        + (f" (before the recording {format_bytes(sums.live_at_start_bytes)})" if sums.num_events
           else ""),
        "never freed": f"{format_bytes(sums.never_freed_bytes)} of {sums.num_never_freed:,} "
        f"allocations, of {sums.num_allocs:,} recorded"
        if sums.num_events
        else None,
        "free": f"{format_bytes(pieces.cached_bytes)} cached in whole segments, "
        f"{format_bytes(pieces.inactive_split_bytes)} stranded beside what is in use "
        f"(largest block {format_bytes(pieces.largest_free_bytes)})"
        + (f", {format_bytes(pieces.private_free_bytes)} in private pools (CUDA graphs)"
           if pieces.private_free_bytes else ""),
        "growth": _growth(memory),
    }  # fmt: skip
    views: list[View] = [make_fields(head)]
    for each in memory.oom_reports[:_SHOWN]:
        views.append(_shortage(each))
        views += _moment(each.live_memory, "live when it failed")
    if len(memory.oom_reports) > _SHOWN:
        views.append(NoteView(f"{len(memory.oom_reports)} requests failed: --json lists them"))
    if not any(
        each.live_memory.live_bytes == memory.peak.live_bytes for each in memory.oom_reports
    ):
        views += _moment(memory.peak, "at the peak")
    views += _leaks(memory)
    advice = _advice(memory)
    if advice:
        views.append(TextView("\n".join(f"next: {line}" for line in advice)))
    return views


def _growth(memory: DeviceMemoryReport) -> str | None:
    grown = memory.growth
    if grown.num_steps < MIN_STEPS:
        return None
    return (
        f"{format_bytes(grown.bytes_per_step)} a step over {grown.num_steps} steps (by "
        f"{grown.step_source})"
    )


def _moment(moment: LiveMemory, title: str) -> list[View]:
    whole = max(1, moment.live_bytes)
    kinds = [
        (name, format_bytes(size), f"{100 * size / whole:.0f} %")
        for name, size in sorted(moment.by_category, key=lambda pair: -pair[1])
        if size
    ]
    lines = [
        (format_bytes(each.size_bytes), f"{each.num_tensors:,}", each.category, each.line)
        for each in moment.sources[:_LINES]
    ]
    return [
        make_table("memory, bytes, share", kinds, title, right="bytes, share"),
        make_table("bytes, tensors, memory, line", lines, right="bytes, tensors", wide="line"),
    ]


def _leaks(memory: DeviceMemoryReport) -> list[View]:
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
        make_table(columns, rows, "kept step after step",
              right="bytes a step, tensors a step, held now", wide="line")
    ]  # fmt: skip


def _shortage(short: OutOfMemoryReport) -> View:
    return make_fields(
        {
            "asked": f"{format_bytes(short.requested_bytes)} at {short.line}",
            "live": f"{format_bytes(short.live_memory.live_bytes)} (below)",
            "allocator had": f"{format_bytes(short.reserved_bytes)} reserved, of it "
            f"{format_bytes(short.free_bytes)} free in pieces, the largest "
            f"{format_bytes(short.largest_free_bytes)}",
            "driver had": format_bytes(short.device_free_bytes) + _limit(short),
            "would have fitted": _fitted(short),
            "room is held by": ", ".join(short.lines_to_free[:3]),
        },
        "out of memory",
    )


def _limit(short: OutOfMemoryReport) -> str:
    if not short.has_memory_limit:
        return " free"
    low, high = format_bytes(short.capacity_bytes), format_bytes(short.capacity_upper_bound_bytes)
    return (
        f" free: a limit of this process held it back, between {low} and {high} "
        "(torch.cuda.set_per_process_memory_fraction)"
    )


def _fitted(short: OutOfMemoryReport) -> str:
    least = " at least" if short.has_memory_limit else ""
    found = f"a request of {format_bytes(short.largest_fitting_bytes)}{least}"
    if short.would_fit_unfragmented:
        return found + "; this one, had free memory been in one piece: fragmentation failed it"
    if short.fitting_batch_share is not None and short.fitting_batch_share < 1:
        return (
            found + f"; or this one with {100 * short.fitting_batch_share:.0f} % of the batch: "
            f"{format_bytes(short.batch_dependent_bytes)} grow with it"
        )
    return found + "; too much else was live for this one"


def _advice(memory: DeviceMemoryReport) -> list[str]:
    found = []
    sums, pieces = memory.totals, memory.fragmentation
    if any(each.would_fit_unfragmented for each in memory.oom_reports):
        found.append(f"{_EXPANDABLE} joins free pieces: the failed request would have fitted")
    elif memory.oom_reports:
        found.append(_less(memory.oom_reports[0]))
    elif pieces.inactive_split_bytes > sums.reserved_bytes / 10 and not pieces.is_expandable:
        found.append(
            f"{_EXPANDABLE} lets {format_bytes(pieces.inactive_split_bytes)} of stranded memory be "
            f"reused"
        )
    if pieces.num_mostly_free_segments and pieces.inactive_split_bytes > sums.reserved_bytes / 10:
        found.append(
            f"or max_split_size_mb: {format_bytes(pieces.mostly_free_used_bytes)} in use pin "
            f"{pieces.num_mostly_free_segments} segments that are half free"
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


def _less(short: OutOfMemoryReport) -> str:
    """Say what to make smaller after a request that nothing but less memory would have served."""
    kinds = dict(short.live_memory.by_category)
    largest = max(kinds, key=lambda name: kinds[name])
    share = short.fitting_batch_share
    batch = f"a batch of {100 * share:.0f} %, " if share and share < 1 else ""
    means = {
        "activations": f"{batch}recompute activations (torch.utils.checkpoint)",
        "temporary": f"{batch}smaller pieces of the largest operation",
        "parameters": "shard parameters (FSDP: fully_shard) or use a lower precision",
        "gradients": "shard gradients (ZeRO 2, fully_shard)",
        "optimizer": "shard the optimizer's state (ZeRO 1) or keep it in 8 bits",
        "unknown": f"{batch}record from the start to see what holds the rest",
    }
    return f"{format_bytes(short.missing_bytes)} were lacking: {means[largest]}"


def _data(snapshot: MemorySnapshot, memory: DeviceMemoryReport) -> dict[str, Any]:
    return {
        "device": memory.device,
        **memory.totals._asdict(),
        "peak": _moment_data(memory.peak),
        "growth": memory.growth._asdict()
        | {"leaks": [leak._asdict() for leak in memory.growth.leaks]},
        "fragmentation": memory.fragmentation._asdict(),
        "shortages": [
            each._asdict() | {"live": _moment_data(each.live_memory)} for each in memory.oom_reports
        ],
        "timeline": [
            {"time_us": at, "live_bytes": size}
            for at, size in downsample_live_bytes(snapshot, memory.live)
        ],
    }


def _moment_data(moment: LiveMemory) -> dict[str, Any]:
    return {
        "live_bytes": moment.live_bytes,
        "time_us": moment.time_us,
        "before_recording_bytes": moment.before_recording_bytes,
        "by_category": dict(moment.by_category),
        "sources": [each._asdict() for each in moment.sources[:50]],
        "largest": [each._asdict() for each in moment.largest_tensors],
    }
