"""Memory snapshots as columns: stacks once, absent fields as absent, bounds kept."""

import gzip
import pickle
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.timeline.readers.memory_snapshot.memory_snapshot_reader import (
    ACTIONS,
    UNKNOWN_ACTION,
    parse_snapshot,
    read_memory_snapshot,
)
from tests.timeline.readers.small_dumps import STACK, event, snapshot


def test_columns_hold_what_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "s.pickle.gz"
    data = snapshot([event("alloc", 0, 512), event("free_completed", 0, 512)], active=1024)
    path.write_bytes(gzip.compress(pickle.dumps(data)))
    read = read_memory_snapshot(path)
    assert read.segments.total_bytes.tolist() == [4096]
    assert read.blocks.size_bytes.tolist() == [1024, 3072]
    assert [ACTIONS[code] for code in read.events.action] == ["alloc", "free_completed"]
    assert read.events.time_us.tolist() == [0, 1]


def test_each_stack_is_kept_once() -> None:
    copies = [[dict(frame) for frame in STACK] for _ in range(3)]
    events = [event("alloc", n, 1, frames=frames) for n, frames in enumerate(copies)]
    read = parse_snapshot(snapshot(events), "s", 9999)
    assert read.events.stack.tolist() == [1, 1, 1]
    assert [frame.name for frame in read.get_stack(1)] == ["forward", "_call_impl"]
    assert read.get_stack(0) == ()


def test_a_snapshot_of_2023_has_no_times_and_keeps_stacks_in_a_history() -> None:
    block = {"size": 512, "state": "active_allocated", "history": [{"addr": 0, "frames": STACK}]}
    other = {"size": 256, "state": "inactive"}
    segment = {"address": 4096, "total_size": 768, "active_size": 512, "blocks": [block, other]}
    old = {"segments": [segment], "device_traces": [[{"action": "alloc", "addr": 1, "size": 2}]]}
    read = parse_snapshot(old, "s", 9999)
    assert read.events.time_us.tolist() == [-1]
    assert read.blocks.stack.tolist() == [1, 0]
    assert read.blocks.address.tolist() == [4096, 4608]


def test_segments_alone_are_a_snapshot_too() -> None:
    read = parse_snapshot(snapshot([], active=1024)["segments"], "s", 9999)
    assert read.segments.active_bytes.tolist() == [1024]
    assert read.events.action.size == 0


def test_an_unknown_action_is_kept_as_other() -> None:
    read = parse_snapshot(snapshot([event("teleport", 0, 1)]), "s", 9999)
    assert read.events.action.tolist() == [UNKNOWN_ACTION]


@pytest.mark.parametrize("data", [3, {"segments": 4}, {"entries": []}, "x"])
def test_what_is_no_snapshot_is_refused(data: Any) -> None:
    with pytest.raises(InputError, match="not a memory snapshot"):
        parse_snapshot(data, "s", 999)


def test_one_segment_listed_over_and_over_does_not_unfold_without_bound() -> None:
    segment = snapshot([])["segments"][0] | {"blocks": [{"size": 1}] * 5000}
    with pytest.raises(InputError, match="unfolds"):
        parse_snapshot({"segments": [segment] * 5000}, "s", 50_000)


def test_one_event_listed_over_and_over_does_not_unfold_without_bound() -> None:
    data = snapshot([]) | {"device_traces": [[event("alloc", 0, 8)] * 50_000]}
    with pytest.raises(InputError, match="unfolds"):
        parse_snapshot(data, "s", 110_000)  # what 50,000 references to it take


def test_an_archive_of_torch_save_says_what_to_use_instead(tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pt"
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(InputError, match="_dump_snapshot"):
        read_memory_snapshot(path)
