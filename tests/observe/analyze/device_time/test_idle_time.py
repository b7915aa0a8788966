"""Each gap gets the cause its rule says, and causes add up to the idle time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.observe.analyze.device_time.idle_time import (
    IdleGapCause,
    RankIdle,
    analyze_rank_idle,
)
from tests.observe.analyze.traces import Row, call, host, kernel, timeline

US = 1000


def _gap(*between: Row, launch: int, start: int = 100 * US) -> RankIdle:
    """A device that is idle from 10 µs to `start`, ended by a kernel launched at `launch`."""
    return analyze_rank_idle(
        timeline(
            call(0, 1 * US, flow_out=1),
            kernel(1 * US, 10 * US, "first", flow_in=1),
            *between,
            call(launch, launch + US, flow_out=2),
            kernel(start, start + US, "second", flow_in=2),
        )
    )


def test_a_late_launch_makes_the_device_host_bound() -> None:
    found = _gap(launch=90 * US)
    assert (found.host_bound_ns, found.idle_ns) == (90 * US, 90 * US)
    (gap,) = found.longest_gaps
    assert (gap.cause, gap.span_before, gap.span_after) == (
        IdleGapCause.HOST_BOUND,
        "first",
        "second",
    )


def test_the_time_in_the_data_loader_is_data_wait() -> None:
    loading = host(
        20 * US, 80 * US, "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    )
    found = _gap(loading, launch=90 * US)
    assert (found.data_wait_ns, found.host_bound_ns) == (60 * US, 30 * US)


def test_a_sync_that_drained_the_device_takes_the_gap() -> None:
    found = _gap(call(2 * US, 12 * US, "cudaStreamSynchronize"), launch=90 * US)
    assert found.synchronization_ns == found.idle_ns == 90 * US


def test_a_sync_inside_the_gap_takes_its_own_time() -> None:
    found = _gap(call(30 * US, 50 * US, "cudaDeviceSynchronize"), launch=90 * US)
    assert (found.synchronization_ns, found.host_bound_ns) == (20 * US, 70 * US)


def test_a_wait_of_a_thread_that_launches_nothing_is_no_cause() -> None:
    elsewhere = call(2 * US, 80 * US, "cudaEventSynchronize", lane="thread 9")
    assert _gap(elsewhere, launch=90 * US).host_bound_ns == 90 * US


def test_a_short_gap_after_a_timely_launch_is_a_kernel_gap() -> None:
    found = _gap(launch=2 * US, start=12 * US)
    assert (found.kernel_gap_ns, found.idle_ns) == (2 * US, 2 * US)


def test_a_long_gap_after_a_timely_launch_is_other() -> None:
    assert _gap(launch=2 * US).other_ns == 90 * US


def test_an_unknown_launch_is_never_the_hosts_fault() -> None:
    found = analyze_rank_idle(timeline(kernel(0, 10), kernel(20, 30), kernel(90 * US, 91 * US)))
    assert (found.kernel_gap_ns, found.other_ns) == (10, 90 * US - 30)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 20), st.integers(0, 300)), min_size=1),
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 60)), max_size=4),
    st.sampled_from(["cudaStreamSynchronize", "enumerate(DataLoader)#x.__next__"]),
)
def test_causes_add_up_to_the_idle_time(
    work: list[tuple[int, int, int]], waits: list[tuple[int, int]], name: str
) -> None:
    rows = []
    for number, (start, size, launch) in enumerate(work):
        rows.append(kernel(start * US, (start + size) * US, flow_in=number))
        rows.append(call(launch * US, launch * US + 100, flow_out=number))
    rows += [host(start * US, (start + size) * US, name) for start, size in waits]
    found = analyze_rank_idle(timeline(*rows))
    causes = [getattr(found, f"{cause}_ns") for cause in IdleGapCause]
    assert sum(causes) == found.idle_ns
    assert min(causes) >= 0


@pytest.mark.parametrize("count", [0, 1])
def test_few_spans_leave_no_gap(count: int) -> None:
    rows = [kernel(0, 5), host(0, 1, "x")][1 - count :]
    assert analyze_rank_idle(timeline(*rows)).num_gaps == 0
