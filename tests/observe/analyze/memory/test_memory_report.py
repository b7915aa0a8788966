"""Memory snapshots: sums, peak, growth, fragmentation and shortages, each on a small case."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.observe.analyze.memory import (
    DeviceMemoryReport,
    analyze_memory,
    downsample_live_bytes,
)
from meshwright.timeline.readers.memory_snapshot.memory_snapshot_reader import (
    parse_snapshot,
    read_memory_snapshot,
)
from tests.timeline.readers.small_dumps import event, snapshot

TRUTHS = {
    "segments": "num_segments", "reserved": "reserved_bytes", "active": "active_bytes",
    "allocated": "allocated_bytes", "requested": "requested_bytes", "blocks": "num_blocks",
    "inactive_bytes": "inactive_bytes", "largest_inactive": "largest_inactive_bytes",
    "trace_events": "num_events", "allocs": "num_allocs", "frees": "num_frees",
    "live_at_trace_start": "live_at_start_bytes", "peak_live": "peak_live_bytes",
    "live_end": "live_end_bytes", "trace_allocs_never_freed": "num_never_freed",
    "bytes_never_freed": "never_freed_bytes",
}  # fmt: skip


def _frames(*names: str, file: str = "/jobs/mine/train.py") -> list[dict[str, Any]]:
    return [{"name": name, "filename": file, "line": number} for number, name in enumerate(names)]


FORWARD, BACKWARD = _frames("forward"), _frames("backward")
OPTIMIZER = _frames("step", file="/x/torch/optim/adamw.py")
MAKING, LOOP = _frames("__init__"), _frames("main")


def _report(data: dict[str, Any]) -> DeviceMemoryReport:
    (found,) = analyze_memory(parse_snapshot(data, "s", 10**6))
    return found


def _freed(address: int, size: int, frames: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event(action, address, size, frames=frames)
            for action in ("free_requested", "free_completed")]  # fmt: skip


@pytest.mark.real
def test_sums_equal_the_truths_of_real_snapshots(shared: Path) -> None:
    truths = json.loads((shared / "validation/trace_truths_dev.json").read_text())
    assert len(truths["memory_snapshots"]) == 9
    for name, truth in truths["memory_snapshots"].items():
        read = read_memory_snapshot(shared / "traces/memory-snapshots" / name)
        (found,) = analyze_memory(read)
        mine = {key: getattr(found.totals, field) for key, field in TRUTHS.items()}
        assert mine == truth, name


def test_the_peak_lies_between_allocation_and_free() -> None:
    events = [event("alloc", 0, 600), event("alloc", 600, 300), *_freed(0, 600, LOOP)]
    found = _report(snapshot(events, active=1300))
    assert found.totals.live_at_start_bytes == 1000
    assert found.totals.peak_live_bytes == 1900
    assert found.totals.never_freed_bytes == 300


def test_what_was_allocated_before_the_recording_shows_as_such() -> None:
    found = _report(snapshot([event("alloc", 2048, 100)], active=1024))
    assert found.peak.before_recording_bytes == 924
    assert found.peak.live_bytes == 1024


@pytest.mark.parametrize(
    ("made", "ended", "category"),
    [
        (MAKING, None, "parameters"),
        (OPTIMIZER, None, "optimizer"),
        (OPTIMIZER, OPTIMIZER, "temporary"),
        (BACKWARD, None, "gradients"),
        (BACKWARD, OPTIMIZER, "gradients"),
        (BACKWARD, BACKWARD, "temporary"),
        (FORWARD, BACKWARD, "activations"),
        (FORWARD, FORWARD, "temporary"),
        (LOOP, LOOP, "unknown"),
        (LOOP, BACKWARD, "activations"),
        (OPTIMIZER, LOOP, "optimizer"),
        (MAKING, LOOP, "parameters"),
        (MAKING, MAKING, "temporary"),
    ],
)
def test_stack_and_lifetime_tell_what_memory_is_for(made: Any, ended: Any, category: str) -> None:
    events = [event("alloc", 0, 512, frames=made)]
    if ended is not None:
        events += _freed(0, 512, ended)
    held = snapshot(events, active=0 if ended else 512)
    assert dict(_report(held).peak.by_category)[category] == 512


def test_an_empty_stack_among_python_stacks_is_the_engine_of_autograd() -> None:
    other = [event("alloc", 512, 8, frames=LOOP), *_freed(512, 8, LOOP)]
    events = [event("alloc", 0, 512, frames=FORWARD), *_freed(0, 512, []), *other]
    assert dict(_report(snapshot(events)).peak.by_category)["activations"] == 512


def test_the_peak_is_attributed_to_the_users_lines_largest_first() -> None:
    events = [event("alloc", n, 100, frames=_frames("small")) for n in range(3)]
    events.append(event("alloc", 9, 1000, frames=_frames("large")))
    found = _report(snapshot(events, active=1300))
    lines = [(each.line, each.size_bytes, each.num_tensors) for each in found.peak.sources]
    assert lines[:2] == [
        ("/jobs/mine/train.py:0 large", 1000, 1),
        ("/jobs/mine/train.py:0 small", 300, 3),
    ]


def _loop(
    steps: int, *, leak: bool, every: int = 1, optimizer: bool = False
) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for step in range(steps):
        at = 10_000 * (step + 1)
        events += [
            event("alloc", at + n, 64, frames=_frames("forward", f"layer{n}")) for n in range(5)
        ]
        events.append(event("alloc", at + 20, 32, frames=_frames("backward", "grad")))
        if optimizer:
            if not step:
                events += [event("alloc", 5_000 + n, 96, frames=OPTIMIZER) for n in range(9)]
            events.append(event("alloc", at + 40, 16, frames=OPTIMIZER))
            events += _freed(at + 40, 16, OPTIMIZER)
        if leak and step % every == 0:
            events.append(event("alloc", at + 30, 48, frames=_frames("log_loss")))
        for n in range(5):
            events += _freed(at + n, 64, BACKWARD)
        events += _freed(at + 20, 32, LOOP)
    return events


def test_memory_kept_each_step_is_a_leak_with_its_line() -> None:
    found = _report(snapshot(_loop(8, leak=True), active=8 * 48))
    assert found.growth.step_source == "periodicity"
    assert found.growth.bytes_per_step == 48
    (leak,) = found.growth.leaks
    assert (leak.line, leak.bytes_per_step) == ("/jobs/mine/train.py:0 log_loss", 48)


def test_a_loop_that_gives_all_back_has_no_leak() -> None:
    found = _report(snapshot(_loop(8, leak=False)))
    assert found.growth.num_steps == 7
    assert (found.growth.bytes_per_step, found.growth.leaks) == (0, ())


def test_steps_are_taken_from_annotations_where_there_are_some() -> None:
    data = snapshot(_loop(6, leak=True), active=6 * 48)
    per_step = len(data["device_traces"][0]) // 6
    data["external_annotations"] = [
        {
            "name": "Optimizer.step#AdamW.step",
            "stage": "START",
            "device": 0,
            "time_us": per_step * n,
        }
        for n in range(6)
    ]
    found = _report(data)
    assert found.growth.step_source == "annotations"
    assert found.growth.leaks[0].bytes_per_step == 48


def _marked(data: dict[str, Any], steps: int, *names: str) -> dict[str, Any]:
    """Mark steps by annotations of several names each."""
    per_step = len(data["device_traces"][0]) / steps
    marks = [
        {"name": name, "stage": "START", "device": 0, "time_us": int(per_step * (n + 0.4 * place))}
        for n in range(steps)
        for place, name in enumerate(names)
    ]
    return data | {"external_annotations": marks}


@pytest.mark.parametrize(
    "names",
    [
        ("ProfilerStep#7", "Optimizer.step#AdamW.step"),
        ("Optimizer.step#Muon.step", "Optimizer.step#AdamW.step"),
        ("train_step", "Optimizer.step#AdamW.step"),
    ],
)
def test_two_marks_of_each_step_are_not_two_steps(names: tuple[str, str]) -> None:
    data = snapshot(_loop(9, leak=True), active=9 * 48)
    found = _report(_marked(data, 9, *names)).growth
    assert (found.step_source, found.num_steps, found.bytes_per_step) == ("annotations", 8, 48)
    assert [leak.bytes_per_step for leak in found.leaks] == [48]


def test_marks_from_before_a_full_ring_are_no_steps() -> None:
    data = _marked(snapshot(_loop(20, leak=True), active=20 * 48), 20, "Optimizer.step#SGD.step")
    (events,) = data["device_traces"]
    found = _report(data | {"device_traces": [events[len(events) // 2 :]]}).growth
    assert (found.num_steps, found.bytes_per_step) == (9, 48)
    assert [leak.bytes_per_step for leak in found.leaks] == [48]


@pytest.mark.parametrize(("leak", "every"), [(False, 1), (True, 1), (True, 3)])
def test_steps_are_told_by_what_the_optimizer_allocates(leak: bool, every: int) -> None:
    kept = 9 * 96 + (48 * 12 // every if leak else 0)
    found = _report(snapshot(_loop(12, leak=leak, every=every, optimizer=True), active=kept)).growth
    assert (found.step_source, found.num_steps) == ("optimizer", 11)
    expected = [("/jobs/mine/train.py:0 log_loss", 48 // every)] if leak else []
    assert [(one.line, one.bytes_per_step) for one in found.leaks] == expected


def test_what_is_made_once_after_the_start_is_no_leak() -> None:
    events = _loop(5, leak=False, optimizer=True)
    middle = 2 * len(events) // 5
    events[middle:middle] = [event("alloc", 900_000, 4096, frames=_frames("forward", "workspace"))]
    assert _report(snapshot(events, active=9 * 96 + 4096)).growth.leaks == ()


def test_parameters_made_before_the_first_step_are_no_steps() -> None:
    made = [event("alloc", 1 + n, 8 * n, frames=MAKING) for n in range(1, 60)]
    found = _report(snapshot(made + _loop(12, leak=True), active=4096)).growth
    assert found.step_source == "periodicity"
    assert [leak.bytes_per_step for leak in found.leaks] == [48]


def test_layers_that_keep_their_activations_are_no_leak() -> None:
    events = [
        event("alloc", 100 * n + part, 64, frames=_frames("forward", f"part{part}"))
        for n in range(20)
        for part in range(4)
    ]
    found = _report(snapshot(events, active=80 * 64, total=80 * 64))
    assert found.growth.leaks == ()


def test_free_memory_beside_used_memory_is_stranded_whole_segments_are_cached() -> None:
    data = snapshot([], active=1024)
    empty = snapshot([], active=0, total=8192)["segments"]
    found = _report(data | {"segments": data["segments"] + empty}).fragmentation
    assert (found.inactive_split_bytes, found.cached_bytes) == (3072, 8192)
    assert (found.num_mostly_free_segments, found.mostly_free_used_bytes) == (1, 1024)
    assert found.largest_free_bytes == 8192


def test_free_memory_of_private_pools_serves_nobody_else() -> None:
    data = snapshot([], active=1024)
    pool = snapshot([], active=512, total=8192)["segments"][0]
    graph = pool | {"segment_pool_id": (0, 3), "address": 1 << 30}
    oom = {"action": "oom", "size": 6000, "device_free": 0, "stream": 0, "frames": []}
    both = data | {"segments": [*data["segments"], graph], "device_traces": [[oom]]}
    found = _report(both)
    pieces = found.fragmentation
    assert (pieces.inactive_split_bytes, pieces.private_free_bytes) == (3072, 7680)
    assert pieces.largest_free_bytes == 3072
    assert not found.oom_reports[0].would_fit_unfragmented


def test_devices_are_told_apart() -> None:
    one, two = snapshot(_loop(8, leak=True), active=8 * 48), snapshot(_loop(8, leak=False))
    other = two["segments"][0] | {"device": 3, "active_size": 0}
    traces = [*one["device_traces"], [], [], *two["device_traces"]]
    data = one | {"segments": [*one["segments"], other], "device_traces": traces}
    found = analyze_memory(parse_snapshot(data, "s", 10**6))
    assert [each.device for each in found] == [0, 3]
    assert [len(each.growth.leaks) for each in found] == [1, 0]
    assert found[1].totals.num_never_freed == 0


def test_a_failed_request_is_explained() -> None:
    events = [
        event("alloc", 0, 1024, frames=_frames("keep")),
        {"action": "oom", "size": 5000, "device_free": 500, "stream": 0, "frames": _frames("ask")},
    ]
    found = _report(snapshot(events, active=1024))
    (short,) = found.oom_reports
    assert (short.requested_bytes, short.device_free_bytes) == (5000, 500)
    assert short.line == "/jobs/mine/train.py:0 ask"
    assert short.largest_free_bytes == 3072
    assert short.missing_bytes == 5000 - 3072
    assert not short.would_fit_unfragmented
    assert short.live_memory.live_bytes == 1024
    assert short.lines_to_free == ("/jobs/mine/train.py:0 keep",)


def test_a_request_that_failed_only_for_want_of_one_piece_says_so() -> None:
    oom = {"action": "oom", "size": 3500, "device_free": 500, "stream": 0, "frames": []}
    (short,) = _report(snapshot([oom], active=1024)).oom_reports
    assert short.would_fit_unfragmented


def _oom(size: int, free: int) -> dict[str, Any]:
    return {"action": "oom", "size": size, "device_free": free, "frames": _frames("ask")}


def test_what_a_failure_unwinds_is_what_it_was_when_it_failed() -> None:
    events = [event("alloc", 0, 1024, frames=FORWARD), _oom(9000, 0), *_freed(0, 1024, FORWARD)]
    (short,) = _report(snapshot(events)).oom_reports
    assert dict(short.live_memory.by_category)["activations"] == 1024
    assert (short.reserved_bytes, short.free_bytes, short.largest_free_bytes) == (4096, 3072, 3072)
    assert short.fitting_batch_share == pytest.approx(4096 / (1024 + 9000))


def test_a_driver_with_room_means_that_the_process_has_a_limit() -> None:
    mib = 1 << 20
    more = {"action": "segment_alloc", "addr": 1 << 40, "size": 20 * mib, "frames": []}
    less = more | {"action": "segment_free"}
    events = [more, less, event("alloc", 0, 1024), _oom(30 * mib, 99 * mib)]
    (short,) = _report(snapshot(events, active=1024)).oom_reports
    assert short.has_memory_limit
    assert (short.capacity_bytes, short.capacity_upper_bound_bytes) == (
        20 * mib + 4096,
        30 * mib + 4096,
    )
    assert (short.largest_fitting_bytes, short.missing_bytes) == (20 * mib, 10 * mib)


def test_the_timeline_keeps_the_highest_of_each_stretch() -> None:
    events = [each for n in range(500) for each in (event("alloc", n, 8), *_freed(n, 8, LOOP))]
    read = parse_snapshot(snapshot(events, active=0), "s", 10**6)
    (found,) = analyze_memory(read)
    thin = downsample_live_bytes(read, found.live, most=50)
    assert len(thin) == 50
    assert max(size for _, size in thin) == found.totals.peak_live_bytes
