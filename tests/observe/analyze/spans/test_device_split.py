"""A process that drives several devices is parted: busy, idle and hidden time are a device's."""

import json

from meshwright.observe.analyze.compute_efficiency.mfu import analyze_mfu
from meshwright.observe.analyze.compute_efficiency.trace_device import read_device_name
from meshwright.observe.analyze.device_time.breakdown import analyze_breakdown
from meshwright.observe.analyze.device_time.overlap import analyze_overlap
from meshwright.observe.analyze.spans.device_split import split_by_device
from meshwright.observe.analyze.step_profile import build_step_profile
from meshwright.observe.notebook import idle
from meshwright.observe.overview import analyze_run
from meshwright.timeline.timeline import Timeline
from tests.observe.analyze.traces import Row, call, collective, copy, kernel, timeline

SECOND = {"process": "gpu 1"}
US = 1000


def _two_devices(*more: Row) -> Timeline:
    """Two devices that take turns: at any moment one of them works."""
    devices = [
        {"id": 0, "name": "NVIDIA A100-SXM4-80GB"},
        {"id": 1, "name": "NVIDIA H100 80GB HBM3"},
    ]
    return timeline(
        call(0, 2 * US, flow_out=1), kernel(10 * US, 60 * US, flow_in=1),
        call(3 * US, 5 * US, flow_out=2), kernel(60 * US, 110 * US, flow_in=2, **SECOND),
        call(6 * US, 8 * US, flow_out=3), kernel(110 * US, 160 * US, flow_in=3),
        call(9 * US, 11 * US, flow_out=4), kernel(160 * US, 210 * US, flow_in=4, **SECOND),
        *more,
        metadata={"devices": json.dumps(devices)},
    )  # fmt: skip


def test_each_device_has_its_own_busy_and_idle_time() -> None:
    found = analyze_breakdown(_two_devices())
    assert [(one.rank, one.busy_ns, one.idle_ns) for one in found] == [
        (0, 100 * US, 50 * US),
        (1, 100 * US, 50 * US),
    ]
    assert [one.idle_ns for one in idle(_two_devices())] == [50 * US, 50 * US]


def test_compute_of_one_device_hides_no_communication_of_the_other() -> None:
    part = _two_devices(
        collective(10 * US, 60 * US, process="gpu 1"), collective(160 * US, 210 * US)
    )
    assert [one.overlap_share for one in analyze_overlap(part)] == [0.0, 0.0]


def test_each_device_is_held_against_its_own_peak() -> None:
    assert [one.device for one in analyze_mfu(_two_devices())] == ["a100-80g-sxm", "h100-80g-sxm"]
    assert [read_device_name(part.metadata) for part in split_by_device(_two_devices())][
        1
    ].startswith("NVIDIA H100")


def test_a_step_is_the_mean_over_devices() -> None:
    found = build_step_profile([_two_devices()])
    assert (found.ranks, found.step_ns) == ((0, 1), 150.0 * US)


def test_the_overview_says_which_rank_is_which_device() -> None:
    found = analyze_run(_two_devices())
    assert [one.rank for one in found.ranks] == [0, 1]
    assert sum(one.num_spans for one in found.ranks) == _two_devices().num_spans
    path = found.ranks[0].critical_path
    assert path is not None
    assert path.ns_by_cause["kernel"] == 200 * US  # The devices take turns: the path is on both.
    assert found.ranks[0].notes == (
        "one process drives 2 devices: rank 0 is gpu 0, rank 1 is gpu 1",
    )


def test_a_device_that_was_only_touched_is_none() -> None:
    part = timeline(kernel(0, 1000), copy(100, 101, process="gpu 3"))
    assert [one.num_spans for one in analyze_breakdown(part)] == [2]
    assert list(split_by_device(part)) == [part]


def test_ranks_of_several_processes_stay_apart() -> None:
    rows = (kernel(0, 50), kernel(50, 100, **SECOND))
    both = Timeline.concat([timeline(*rows, rank=rank) for rank in (0, 1)])
    assert [one.rank for one in analyze_breakdown(both)] == [0, 1, 2, 3]
