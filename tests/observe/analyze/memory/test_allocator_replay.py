"""Replays: blocks as large as the allocator makes them, segments as they were at each moment."""

from typing import Any

from meshwright.observe.analyze.memory.allocator_replay import AllocatorReplay, replay_allocator
from meshwright.timeline.readers.memory_snapshot.memory_snapshot_reader import parse_snapshot
from tests.timeline.readers.small_dumps import event

MIB = 1 << 20


def _segment(address: int, size: int, used: dict[int, int], **more: Any) -> dict[str, Any]:
    """Make a segment; `used` maps addresses to sizes."""
    rows, at = [], address
    for where, length in sorted(used.items()):
        if where > at:
            rows.append({"address": at, "size": where - at, "state": "inactive"})
        rows.append({"address": where, "size": length, "state": "active_allocated"})
        at = where + length
    if at < address + size:
        rows.append({"address": at, "size": address + size - at, "state": "inactive"})
    active = sum(used.values())
    return {"device": 0, "address": address, "total_size": size, "active_size": active,
            "allocated_size": active, "blocks": rows} | more  # fmt: skip


def _replay(
    segments: list[dict[str, Any]], events: list[dict[str, Any]], **more: Any
) -> AllocatorReplay:
    data = {"segments": segments, "device_traces": [events], **more}
    return replay_allocator(parse_snapshot(data, "s", 10**6), 0)


def test_requests_are_rounded_up_to_512_bytes() -> None:
    found = _replay([_segment(0, 2 * MIB, {0: 1024})], [event("alloc", 0, 513)])
    assert (found.peak_allocated_bytes, found.is_exact) == (1024, True)


def test_a_large_block_with_little_left_over_is_not_cut() -> None:
    found = _replay([_segment(0, 20 * MIB, {0: 20 * MIB})], [event("alloc", 0, 19 * MIB + 5)])
    assert (found.peak_allocated_bytes, found.is_exact) == (20 * MIB, True)


def test_an_expandable_segment_is_cut_where_512_bytes_are_left() -> None:
    segment = _segment(0, 20 * MIB, {0: 19 * MIB + 512}, is_expandable=True)
    found = _replay([segment], [event("alloc", 0, 19 * MIB + 5)])
    assert (found.peak_allocated_bytes, found.is_exact) == (19 * MIB + 512, True)


def test_blocks_above_the_splitting_size_are_not_cut() -> None:
    found = _replay(
        [_segment(0, 64 * MIB, {0: 64 * MIB})], [event("alloc", 0, 40 * MIB)],
        allocator_settings={"max_split_size": 32 * MIB},
    )  # fmt: skip
    assert (found.peak_allocated_bytes, found.is_exact) == (64 * MIB, True)


def test_blocks_freed_since_count_at_the_start() -> None:
    events = [event("free_requested", 512, 500), event("free_completed", 512, 500)]
    found = _replay([_segment(0, 2 * MIB, {0: 512})], events)
    assert (found.peak_allocated_bytes, found.is_exact) == (1024, True)


def test_a_block_asked_back_is_allocated_no_more_and_still_in_its_place() -> None:
    events = [
        event("alloc", 0, 512), event("free_requested", 0, 512), event("alloc", 512, 512),
        event("free_completed", 0, 512),
    ]  # fmt: skip
    found = _replay([_segment(0, 2 * MIB, {512: 512})], events)
    assert (found.peak_allocated_bytes, found.is_exact) == (512, True)


def test_segments_given_back_count_in_the_most_reserved() -> None:
    events = [
        event("segment_alloc", 4 * MIB, 8 * MIB),
        event("segment_free", 4 * MIB, 8 * MIB),
        event("segment_free", 32 * MIB, MIB),
    ]
    found = _replay([_segment(0, 2 * MIB, {})], events)
    assert (found.peak_reserved_bytes, found.is_exact) == (11 * MIB, True)


def test_expandable_segments_grow_and_shrink_in_place() -> None:
    events = [
        event("segment_map", 2 * MIB, 6 * MIB),
        event("alloc", MIB, 5 * MIB),
        {"action": "oom", "size": 9 * MIB, "device_free": 0, "frames": []},
        event("free_requested", MIB, 5 * MIB),
        event("free_completed", MIB, 5 * MIB),
        event("segment_unmap", 4 * MIB, 4 * MIB),
    ]
    found = _replay([_segment(0, 4 * MIB, {0: MIB}, is_expandable=True)], events)
    assert (found.peak_reserved_bytes, found.is_exact) == (8 * MIB, True)
    assert found.peak_allocated_bytes == 6 * MIB
    (room,) = found.failures.values()
    assert (room.reserved_bytes, room.free_bytes, room.largest_free_bytes) == (
        8 * MIB, 2 * MIB, 2 * MIB,
    )  # fmt: skip


def test_events_that_do_not_fit_the_segments_are_told() -> None:
    assert not _replay([_segment(0, 2 * MIB, {})], [event("alloc", 0, 512)]).is_exact
