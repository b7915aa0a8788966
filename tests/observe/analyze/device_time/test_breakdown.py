"""Every moment of the window is in one part, and the parts are the ones meant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.observe.analyze.device_time.breakdown import (
    analyze_breakdown,
    analyze_rank_breakdown,
    collective_of,
)
from meshwright.observe.analyze.device_time.overlap import analyze_rank_overlap
from meshwright.observe.analyze.spans.device_spans import find_device_spans
from meshwright.timeline.timeline import Timeline
from tests.observe.analyze.traces import Row, collective, copy, kernel, timeline


def test_compute_hides_communication_and_both_hide_copies() -> None:
    found = analyze_rank_breakdown(
        timeline(kernel(0, 40), collective(30, 60), copy(55, 70), kernel(90, 100))
    )
    assert found.window_ns == 100
    assert found.compute_ns == 50
    assert found.exposed_communication_ns == 20
    assert found.exposed_memory_copy_ns == 10
    assert found.idle_ns == 20
    assert (found.communication_ns, found.memory_copy_ns, found.busy_ns) == (30, 15, 80)
    assert found.share(found.idle_ns) == 0.2


def test_exposed_communication_is_told_by_collective_and_library() -> None:
    found = analyze_rank_breakdown(
        timeline(
            kernel(0, 10),
            collective(5, 30, "ncclDevKernel_AllGather_RING_LL"),
            collective(20, 50, "ncclDevKernel_SendRecv", collective="all_to_allv"),
            collective(60, 65, "void deep_ep::internode::dispatch<8>"),
        )
    )
    told = [(x.collective, x.library, x.total_ns, x.exposed_ns) for x in found.communication]
    assert told == [
        ("all_gather", "nccl", 25, 20),
        ("all_to_all", "nccl", 30, 20),
        ("dispatch", "deepep", 5, 5),
    ]
    assert sum(x.exposed_ns for x in found.communication) == found.exposed_communication_ns


@pytest.mark.parametrize(
    ("name", "collective"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "all_reduce"),
        ("ncclKernel_ReduceScatter_RING_LL_Sum_float", "reduce_scatter"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("void vllm::cross_device_reduce_2stage<bf16, 8>", "all_reduce"),
        ("ncclDevKernel_Generic", "other"),
        ("message pp 0>1", "message"),
    ],
)
def test_names_of_kernels_tell_the_collective(name: str, collective: str) -> None:
    assert collective_of(name) == collective


def test_a_rank_without_device_work_has_an_empty_window() -> None:
    (found,) = analyze_breakdown(timeline({"start_ns": 0, "duration_ns": 5, "name": "x"}))
    assert (found.window_ns, found.idle_ns, found.communication) == (0, 0, ())
    assert found.share(0) == 0.0


MAKERS = {"compute": kernel, "communication": collective, "copy": copy}
ROWS = st.lists(
    st.tuples(st.sampled_from(sorted(MAKERS)), st.integers(0, 60), st.integers(0, 20)),
    min_size=1,
    max_size=15,
)


def _timeline(rows: list[tuple[str, int, int]]) -> Timeline:
    spans: list[Row] = [MAKERS[kind](start, start + size) for kind, start, size in rows]
    return timeline(*spans)


@given(ROWS)
def test_parts_add_up_to_the_window(rows: list[tuple[str, int, int]]) -> None:
    part = _timeline(rows)
    found = analyze_rank_breakdown(part)
    parts = (
        found.compute_ns,
        found.exposed_communication_ns,
        found.exposed_memory_copy_ns,
        found.idle_ns,
    )
    low, high = find_device_spans(part).window_ns
    assert sum(parts) == found.window_ns == high - low
    assert min(parts) >= 0


@given(ROWS)
def test_hidden_and_exposed_communication_add_up(rows: list[tuple[str, int, int]]) -> None:
    part = _timeline(rows)
    hidden, exposed = (
        analyze_rank_overlap(part).hidden_ns,
        analyze_rank_breakdown(part).exposed_communication_ns,
    )
    assert hidden + exposed == analyze_rank_overlap(part).communication_ns


def test_overlap_is_the_hidden_share_of_communication() -> None:
    part = timeline(kernel(0, 40), collective(30, 70), copy(40, 70))
    assert analyze_rank_overlap(part).overlap_share == 0.25


def test_overlap_without_communication_is_none() -> None:
    assert analyze_rank_overlap(timeline(kernel(0, 40))).overlap_share is None
