"""How the host feeds the device: delays, queues, launch-bound regions, graph candidates."""

import pytest

from meshwright.observe.analyze.device_time.launches import analyze_rank_launches
from tests.observe.analyze.traces import Row, call, host, kernel, step, timeline

US, MS = 1000, 1_000_000


def test_delay_runs_from_the_end_of_the_call_to_the_start_of_the_kernel() -> None:
    found = analyze_rank_launches(
        timeline(
            call(0, 5, flow_out=1),
            kernel(15, 20, flow_in=1),
            call(10, 40, flow_out=2),
            kernel(30, 35, flow_in=2),
            kernel(50, 60),
        )
    )
    assert found.launch_delay is not None
    assert (
        found.launch_delay.num_samples,
        found.launch_delay.mean_ns,
        found.launch_delay.max_ns,
    ) == (2, 5, 10)
    assert found.call_duration is not None
    assert found.call_duration.mean_ns == 17.5
    assert (
        found.num_launches,
        found.num_unknown_launches,
        found.num_kernels_shorter_than_call,
    ) == (2, 1, 1)


def test_a_queue_holds_what_is_launched_and_not_begun() -> None:
    found = analyze_rank_launches(
        timeline(
            call(0, 1, flow_out=1),
            call(10, 11, flow_out=2),
            kernel(30, 40, flow_in=1),
            kernel(50, 60, flow_in=2),
        )
    )
    (queue,) = found.stream_queues
    # One for 10 ns, two for 20 ns, one for 20 ns.
    assert queue.max_length == 2
    assert queue.mean_length == pytest.approx(70 / 50)


def test_a_graph_is_one_launch_of_many_kernels() -> None:
    found = analyze_rank_launches(
        timeline(
            call(0, 10, "cudaGraphLaunch", flow_out=1),
            *(kernel(20 + 10 * n, 28 + 10 * n, flow_in=1) for n in range(5)),
        )
    )
    assert (found.num_launches, found.num_graph_launches, found.launch_delay) == (1, 1, None)


def _busy_host(*more: Row, gap: int) -> list[Row]:
    """5 ms in which a kernel of 10 µs starts every `gap`."""
    rows: list[Row] = list(more)
    for number, start in enumerate(range(0, 5 * MS, gap)):
        rows += [call(start, start + 5 * US, flow_out=number)]
        rows += [kernel(start + 6 * US, start + 16 * US, flow_in=number)]
    return rows


def test_short_kernels_far_apart_make_a_launch_bound_region() -> None:
    (region,) = analyze_rank_launches(timeline(*_busy_host(gap=50 * US))).launch_bound_regions
    assert region.mean_kernel_ns == 10 * US
    assert region.idle_ns / (region.end_ns - region.start_ns) == pytest.approx(0.8, abs=0.01)
    assert region.num_kernels == 100


def test_kernels_close_together_are_not_launch_bound() -> None:
    assert analyze_rank_launches(timeline(*_busy_host(gap=12 * US))).launch_bound_regions == ()


def test_a_waiting_host_is_not_launch_bound() -> None:
    waits = [call(n * MS, n * MS + 500 * US, "cudaStreamSynchronize") for n in range(6)]
    assert (
        analyze_rank_launches(timeline(*_busy_host(*waits, gap=50 * US))).launch_bound_regions == ()
    )


def _steps(*names: str) -> list[Row]:
    """One step per letter-coded sequence of kernels, twelve of each letter."""
    rows: list[Row] = []
    flow = 0
    for number, letters in enumerate(names):
        begin = number * MS
        rows.append(step(number, begin, begin + MS))
        for place, letter in enumerate(letters * 12):
            flow += 1
            at = begin + place * 10 * US
            rows += [
                call(at, at + US, flow_out=flow),
                kernel(at + US, at + 2 * US, letter, flow_in=flow),
            ]
    return rows


def test_steps_with_the_same_kernels_are_graph_candidates() -> None:
    found = analyze_rank_launches(timeline(*_steps("ab", "ab", "ba", "ab", "ab")))
    (candidate,) = found.graph_candidates
    assert candidate.step_numbers == (0, 1, 3)  # The last step is not counted.
    assert (candidate.num_launches, candidate.num_synchronizing_calls) == (24, 0)
    assert candidate.idle_ns == 23 * 9 * US


def test_steps_that_differ_are_no_candidates() -> None:
    assert analyze_rank_launches(timeline(*_steps("ab", "ba", "aab", "b"))).graph_candidates == ()


def test_a_host_without_device_launches_nothing() -> None:
    found = analyze_rank_launches(timeline(host(0, 5, "aten::add")))
    assert (
        found.num_launches,
        found.launch_delay,
        found.stream_queues,
        found.launch_bound_regions,
    ) == (0, None, (), ())
