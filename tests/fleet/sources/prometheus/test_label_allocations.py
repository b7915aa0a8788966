import json

import numpy as np

from meshwright.fleet.sources.prometheus.client import PrometheusClient
from meshwright.fleet.sources.prometheus.label_allocations import (
    AllocationSpan,
    AllocationTracker,
    DeviceSpan,
    LabelSnapshot,
)
from meshwright.fleet.sources.prometheus.query import PrometheusScope, QueryWindow
from meshwright.fleet.sources.prometheus.time_grid import TimeGrid, find_runs, split_grids


def _cut(end_s: float) -> QueryWindow:
    grid = TimeGrid(end_s - 270, 30.0, 10)
    return QueryWindow(PrometheusClient("http://nowhere"), PrometheusScope("c", frozenset()), grid)


def _device(gpu: int, uuid: str, since_s: float, last_s: float) -> DeviceSpan:
    return DeviceSpan("n1", gpu, uuid, None, since_s, last_s)


def test_times_are_multiples_of_the_step_and_slices_neither_overlap_nor_leave_gaps() -> None:
    found = list(split_grids(95.0, 400.0, 30.0, 4))
    times = np.concatenate([each.times() for each in found])
    assert times.tolist() == [float(at) for at in range(120, 391, 30)]


def test_a_gap_ends_a_stretch() -> None:
    times = np.array([0.0, 30, 60, 600, 630])
    assert find_runs(times, 300) == [(0, 60), (600, 630)]


def test_a_stretch_goes_on_through_a_cursor() -> None:
    first = AllocationTracker()
    first.add_snapshot(
        LabelSnapshot((_device(0, "a", 0, 300),), (AllocationSpan("71", "n1", 0, 0, 300, 1.0),)),
        _cut(300),
        {},
    )
    second = AllocationTracker(json.loads(json.dumps(first.to_cursor())))
    gpus, held = second.add_snapshot(
        LabelSnapshot(
            (_device(0, "a", 300, 600),), (AllocationSpan("71", "n1", 0, 300, 600, 1.0),)
        ),
        _cut(600),
        {},
    )
    assert gpus.num_rows == 0  # nothing that was not told
    assert [(row["start_s"], row["end_s"]) for row in held.to_pylist()] == [(0, 600)]


def test_a_silent_node_keeps_its_devices_and_a_lost_device_ends() -> None:
    holding = AllocationTracker()
    both = (_device(0, "a", 0, 300), _device(1, "b", 0, 300))
    holding.add_snapshot(LabelSnapshot(both, ()), _cut(300), {})
    silent, _ = holding.add_snapshot(LabelSnapshot((), ()), _cut(1200), {})
    assert silent.num_rows == 0
    lost, _ = holding.add_snapshot(
        LabelSnapshot((_device(0, "a", 1200, 1500),), ()), _cut(1500), {}
    )
    rows = {row["uuid"]: row["until_s"] for row in lost.to_pylist()}
    assert rows == {"b": 300}


def test_what_ended_in_minutes_that_are_read_again_is_not_told_twice() -> None:
    holding = AllocationTracker()
    ended = (_device(0, "a", 0, 1500), _device(1, "b", 0, 900))
    holding.add_snapshot(
        LabelSnapshot(ended, (AllocationSpan("71", "n1", 1, 0, 900, 1.0),)), _cut(1500), {}
    )
    on = AllocationTracker(json.loads(json.dumps(holding.to_cursor())))
    tails = (_device(0, "a", 900, 1800), _device(1, "b", 870, 900))
    gpus, held = on.add_snapshot(
        LabelSnapshot(tails, (AllocationSpan("71", "n1", 1, 870, 900, 1.0),)), _cut(1800), {}
    )
    assert (gpus.num_rows, held.num_rows) == (0, 0)


def test_a_device_that_comes_back_has_a_second_stretch() -> None:
    holding = AllocationTracker()
    first = (_device(0, "a", 0, 1500), _device(1, "b", 0, 900))
    holding.add_snapshot(LabelSnapshot(first, ()), _cut(1500), {})
    gpus, _ = holding.add_snapshot(
        LabelSnapshot((_device(0, "a", 1500, 1800), _device(1, "b", 1600, 1800)), ()),
        _cut(1800),
        {},
    )
    assert [(row["uuid"], row["since_s"], row["until_s"]) for row in gpus.to_pylist()] == [
        ("b", 1600, None)
    ]


def test_how_long_a_gpu_has_been_held_is_told_at_the_end_of_a_reading() -> None:
    holding = AllocationTracker()
    on, over = (
        AllocationSpan("71", "n1", 0, 0, 300, 1.0),
        AllocationSpan("72", "n1", 1, 0, 300, 1.0),
    )
    _, first = holding.add_snapshot(LabelSnapshot((), (on, over)), _cut(300), {}, last=False)
    _, second = holding.add_snapshot(
        LabelSnapshot((), (on._replace(start_s=300, last_s=900),)), _cut(900), {}, last=False
    )
    _, third = holding.add_snapshot(
        LabelSnapshot((), (on._replace(start_s=900, last_s=1200),)), _cut(1200), {}
    )
    assert first.num_rows == 0
    assert [(row["job"], row["end_s"]) for row in second.to_pylist()] == [("72", 300)]
    assert [(row["job"], row["start_s"], row["end_s"]) for row in third.to_pylist()] == [
        ("71", 0, 1200)
    ]


def test_an_index_that_another_device_takes_over_ends_the_first() -> None:
    holding = AllocationTracker()
    holding.add_snapshot(LabelSnapshot((_device(0, "a", 0, 300),), ()), _cut(300), {})
    gpus, _ = holding.add_snapshot(
        LabelSnapshot((_device(0, "b", 330, 600),), ()), _cut(600), {("n1", 0): 8e10}
    )
    rows = {row["uuid"]: (row["since_s"], row["until_s"]) for row in gpus.to_pylist()}
    assert rows == {"a": (0, 300), "b": (330, None)}
    assert gpus["memory"].to_pylist() == [8e10, 8e10]


def test_jobs_that_share_a_gpu_hold_a_part_each() -> None:
    holds = (AllocationSpan("1", "n1", 0, 0, 300, 1.0), AllocationSpan("2", "n1", 0, 0, 300, 1.0))
    instance = AllocationSpan("3", "n1", 1, 0, 300, 3 / 7)
    _, held = AllocationTracker().add_snapshot(LabelSnapshot((), (*holds, instance)), _cut(300), {})
    assert {row["job"]: row["gpu_fraction"] for row in held.to_pylist()} == {
        "1": 0.5,
        "2": 0.5,
        "3": 3 / 7,
    }
