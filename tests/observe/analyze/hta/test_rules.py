"""HTA's rules on tiny traces, worked out by hand."""

import json
from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.observe.analyze.hta.hta_counters import (
    get_launch_stats,
    get_memory_bandwidth,
    get_queue_lengths,
)
from meshwright.observe.analyze.hta.hta_device_time import (
    get_comm_comp_overlap,
    get_kernel_types,
    get_temporal_breakdown,
)
from meshwright.observe.analyze.hta.hta_frame import HtaFrame, build_frames, classify_hta_kernel
from meshwright.observe.analyze.hta.hta_idle import get_idle_breakdown
from meshwright.observe.analyze.hta.hta_kernels import get_kernel_breakdown
from meshwright.observe.analyze.hta.hta_report import build_hta_report
from meshwright.timeline.timeline import Timeline
from tests.observe.analyze.traces import Row, call, copy, host, kernel, step, timeline

US = 1000
BASE = {"base_ns": "0"}


def _extra(**said: Any) -> str:
    return json.dumps(said)


def _gpu(start: float, end: float, name: str = "gemm", stream: int = 7, flow: int = -1) -> Row:
    """A kernel; times in µs."""
    more = {"lane": f"stream {stream}", "flow_in": flow}
    said = _extra(stream=stream, correlation=flow) if flow >= 0 else _extra(stream=stream)
    return kernel(round(start * US), round(end * US), name, extra=said, **more)


def _call(start: float, end: float, flow: int, name: str = "cudaLaunchKernel") -> Row:
    """The call that launches a kernel; times in µs."""
    said = _extra(correlation=flow)
    return call(round(start * US), round(end * US), name, flow_out=flow, extra=said)


def _timeline(*rows: Row) -> Timeline:
    return timeline(*rows, metadata=BASE)


def _frame(*rows: Row) -> HtaFrame:
    (found,) = build_frames(_timeline(*rows))
    return found


def test_starts_are_rounded_up_and_ends_down() -> None:
    found = get_temporal_breakdown(_frame(_gpu(10.4, 20.6), _gpu(30.0, 41.0)))
    # 11..20 and 30..41: 20 of 30 µs busy.
    assert found[1:] == (10, 20, 0, 30)


def test_a_kernel_shorter_than_the_rounding_counts_negative() -> None:
    found = get_temporal_breakdown(_frame(_gpu(10.0, 20.0), _gpu(30.2, 30.9), _gpu(50.0, 60.0)))
    # 31..30 takes a microsecond away from the 20.
    assert (found.compute_us, found.kernel_us) == (19, 50)


def test_an_operator_with_a_stream_counts_as_device_work() -> None:
    launch = host(0, 40 * US, "triton_poi_fused_add_0", extra=_extra(stream=7))
    found = get_temporal_breakdown(_frame(launch, _gpu(50, 60)))
    assert (found.compute_us, found.idle_us) == (50, 10)


def test_only_names_of_nccl_kernels_communicate() -> None:
    assert classify_hta_kernel("ncclDevKernel_AllReduce_Sum") == "COMMUNICATION"
    assert classify_hta_kernel("void deep_ep::internode::dispatch<8>") == "COMPUTATION"
    assert classify_hta_kernel("void ncclDevKernel") == "COMPUTATION"
    assert classify_hta_kernel("Memcpy HtoD (Pinned -> Device)") == "MEMORY"
    assert classify_hta_kernel("Stream Sync") == "OTHER"


def test_the_last_step_is_cut_and_what_it_launched_with_it() -> None:
    found = _frame(
        step(1, 0, 100 * US),
        step(2, 100 * US, 200 * US),
        _call(10, 12, 1),
        _call(110, 112, 2),
        _gpu(20, 30, flow=1),
        _gpu(120, 150, flow=2),
        _gpu(5, 9, flow=3),
    )
    assert get_temporal_breakdown(found).kernel_us == 10


def test_one_step_is_not_cut() -> None:
    found = _frame(step(1, 0, 100 * US), _gpu(20, 30), _gpu(150, 160))
    assert get_temporal_breakdown(found).kernel_us == 140


def test_overlap_is_the_share_of_communication_beside_computation() -> None:
    name = "ncclDevKernel_AllGather"
    assert get_comm_comp_overlap(_frame(_gpu(0, 10), _gpu(8, 20, name, 20))) == 16.67
    assert get_comm_comp_overlap(_frame(_gpu(0, 10))) is None


def test_kernel_types_tell_what_runs_at_once() -> None:
    found = get_kernel_types((_frame(_gpu(0, 10), _gpu(5, 20, "ncclKernel_AllReduce", 20)),))
    assert [tuple(row) for row in found] == [
        ("COMMUNICATION", 10, 50.0),
        ("COMPUTATION", 5, 25.0),
        ("COMPUTATION overlapping COMMUNICATION", 5, 25.0),
    ]


def test_idle_time_is_told_per_stream() -> None:
    found = get_idle_breakdown(
        _frame(
            _call(0, 1, 1),
            _call(1, 2, 2),
            _call(2, 3, 3),
            _call(200, 201, 4),
            _gpu(10, 20, flow=1),
            _gpu(25, 30, flow=2),
            _gpu(70, 80, flow=3),
            _gpu(210, 220, flow=4),
        )
    )
    told = [(row.idle_category, row.idle_us, row.ratio) for row in found]
    assert told == [("host_wait", 130, 0.74), ("kernel_wait", 5, 0.03), ("other", 40, 0.23)]


def test_few_kernels_have_their_own_statistics() -> None:
    (row,) = get_kernel_breakdown(_frame(_gpu(0, 10), _gpu(20, 40)))
    assert (row.name, row.sum_us, row.max_us, row.min_us) == ("gemm", 30, 20, 10)
    assert row.std == pytest.approx(7.0710678)
    assert row.mean_us == 15


def test_many_kernels_are_put_together_as_others() -> None:
    lengths = [100, 90, 80, 70, 60, 50, 40, 30, 20, 10, 5]
    rows = [_gpu(n * 200, n * 200 + size, f"k{n:02}") for n, size in enumerate(lengths)]
    found = {row.name: row for row in get_kernel_breakdown(_frame(*rows))}
    # The running total passes its 80 % quantile (540) after the ninth kernel.
    assert sorted(found) == [*(f"k{n:02}" for n in range(9)), "others"]
    assert (found["k00"].sum_us, found["k00"].std) == (100, 0.0)
    assert found["others"][1:4] == (15, 10, 5)
    assert found["others"].std == pytest.approx(3.5355339)


def test_queue_length_grows_with_launches_and_falls_with_starts() -> None:
    rows = (_call(0, 1, 1), _call(5, 6, 2), _gpu(10, 20, flow=1), _gpu(20, 30, flow=2))
    found = get_queue_lengths(_frame(*rows))
    assert found is not None
    assert [(q.stream, q.length.num, q.length.mean, q.length.max) for q in found] == [
        (7, 4, 1.0, 2.0)
    ]


def test_a_launch_by_a_graph_is_not_in_hta_s_queue() -> None:
    rows = (_call(0, 1, 1, "cudaGraphLaunch"), _gpu(10, 20, flow=1))
    assert get_queue_lengths(_frame(*rows)) == ()


def test_memory_bandwidth_adds_up_what_runs_at_once() -> None:
    name = "Memcpy DtoD (Device -> Device)"
    said = {"stream": 7, "memory bandwidth (GB/s)": 10.0}
    part = _timeline(
        copy(0, 20 * US, name, extra=json.dumps(said)),
        copy(10 * US, 30 * US, name, extra=json.dumps({**said, "memory bandwidth (GB/s)": "5"})),
    )
    (row,) = get_memory_bandwidth(part, build_frames(part)[0])
    assert (row.name, row.gb_per_s.num, row.gb_per_s.max) == ("Memcpy DtoD", 3, 15.0)
    assert row.gb_per_s.min == 5.0


def test_launches_have_delays_not_below_zero() -> None:
    found = get_launch_stats(
        _frame(_call(0, 4, 1), _gpu(10, 20, flow=1), _call(5, 30, 2), _gpu(25, 26, flow=2))
    )
    assert found.delay_us.tolist() == [6, 0]
    assert (found.host_us.tolist(), found.device_us.tolist()) == ([4, 25], [10, 1])


def test_ranks_stand_one_after_another() -> None:
    both = Timeline.concat(
        [
            timeline(_gpu(0, 10), rank=0, metadata=BASE),
            timeline(_gpu(0, 30), rank=1, metadata=BASE),
        ]
    )
    found = build_hta_report(both)
    assert [row.kernel_us for row in found.temporal_breakdown] == [10, 30]
    assert found.overlap_percent == {0: None, 1: None}
    assert [row.sum_us for row in found.kernel_types] == [40]


def test_a_timeline_without_the_arguments_of_launches_is_refused() -> None:
    part = timeline(call(0, 5, flow_out=1), kernel(10, 20, flow_in=1))
    with pytest.raises(InputError, match="full"):
        build_hta_report(part)
