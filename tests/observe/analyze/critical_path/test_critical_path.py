"""The critical path of small timelines, moment by moment; answers are computed by hand."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.observe.analyze.critical_path import build_window_graph, find_critical_path
from meshwright.observe.analyze.critical_path.critical_path import trace_critical_path
from meshwright.observe.analyze.critical_path.graph_timing import compute_graph_times
from meshwright.timeline.readers.kineto.kineto_reader import read_kineto
from meshwright.timeline.timeline import Timeline
from tests.observe.analyze.jobs import collective, steady_job, timeline_of

Row = dict[str, Any]


def launch(start: float, end: float, flow: int, rank: int = 0, **more: Any) -> Row:
    return {
        "rank": rank, "start": start, "end": end, "process": "host", "lane": "thread 1",
        "kind": "host", "name": "cudaLaunchKernel", "category": "cuda_runtime", "flow_out": flow,
        **more,
    }  # fmt: skip


def call(start: float, end: float, name: str, **more: Any) -> Row:
    return {**launch(start, end, -1), "name": name, **more}


def kernel(start: float, end: float, flow: int, name: str = "gemm", **more: Any) -> Row:
    return {"start": start, "end": end, "flow_in": flow, "name": name, **more}


def us(by: dict[Any, int]) -> dict[Any, float]:
    return {key: value / 1000 for key, value in by.items()}


def test_host_then_launch_then_kernels_then_gap() -> None:
    path = find_critical_path(
        timeline_of(
            [
                launch(10, 12, 1),
                kernel(15, 115, 1),
                launch(20, 22, 2),
                kernel(117, 217, 2, "norm"),
            ]
        ),
        window_ns=(0, 300_000),
    )
    assert us(path.ns_by_cause) == {"kernel": 200, "host": 10, "launch delay": 5, "kernel gap": 2}
    assert path.total_ns == 217_000
    assert [one.cause for one in path.segments] == [
        "host", "launch delay", "kernel", "kernel gap", "kernel",
    ]  # fmt: skip


def test_the_host_decides_where_kernels_wait_for_it() -> None:
    rows = []
    for n in range(4):
        rows += [
            {**call(100 * n, 100 * n + 90, "aten::linear"), "category": "cpu_op"},
            launch(100 * n + 80, 100 * n + 85, n),
            kernel(100 * n + 84, 100 * n + 94, n),
        ]
    path = find_critical_path(timeline_of(rows), window_ns=(0, 500_000))
    assert us(path.ns_by_cause) == {"host": 380, "kernel": 10, "launch delay": 4}
    spent = us(path.ns_by_name)
    # From the first start to the fourth launch, 300 to 380 included: all but pauses of 10 µs.
    assert spent["host", "aten::linear"] == 80 + 3 * (80 + 5)
    assert spent["host", "cudaLaunchKernel"] == 3 * 5
    assert spent["host", "(no operator)"] == 3 * 10


def test_a_wait_of_the_host_leads_to_the_work_it_waited_for() -> None:
    path = find_critical_path(
        timeline_of(
            [
                launch(0, 2, 1),
                kernel(5, 505, 1, "big"),
                call(10, 510, "cudaDeviceSynchronize"),
                launch(520, 522, 2),
                kernel(525, 625, 2, "next"),
            ]
        ),
        window_ns=(0, 600_000),
    )
    assert us(path.ns_by_cause) == {
        "kernel": 600, "launch delay": 10, "host": 10, "synchronization": 5,
    }  # fmt: skip


def test_a_call_that_found_the_device_idle_is_the_hosts_own_time() -> None:
    path = find_critical_path(
        timeline_of(
            [
                launch(0, 2, 1),
                kernel(5, 8, 1),
                call(100, 400, "cudaStreamSynchronize"),
                launch(410, 412, 2),
                kernel(415, 425, 2),
            ]
        ),
        window_ns=(0, 500_000),
    )
    assert us(path.ns_by_cause) == {"host": 410, "kernel": 10, "launch delay": 5}


def test_an_event_that_was_written_down_ties_two_streams() -> None:
    sync = {
        "cuda_sync_kind": "Stream Wait Event", "device": 0, "stream": 9, "correlation": 4,
        "wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 3,
    }  # fmt: skip
    rows = [
        launch(0, 1, 2),
        kernel(5, 105, 2, "producer"),
        call(2, 3, "cudaEventRecord"),
        call(4, 5, "cudaStreamWaitEvent", flow_out=4),
        {
            **kernel(5, 6, 4, "Stream Wait Event"),
            "category": "cuda_sync", "kind": "wait", "lane": "stream 9 sync",
            "extra": json.dumps(sync),
        },
        launch(6, 7, 5),
        # So long behind the producer that nothing but the event ties them.
        kernel(150, 250, 5, "consumer", lane="stream 9"),
    ]  # fmt: skip
    path = find_critical_path(timeline_of(rows), window_ns=(0, 300_000))
    assert [one.name for one in path.segments if one.cause == "kernel"] == ["producer", "consumer"]
    assert us(path.ns_by_cause)["kernel gap"] == 45


@pytest.mark.parametrize("extra", ['{"wait_on_stream": 1.5}', '{"wait_on_stream": [7]}'])
def test_waits_whose_arguments_are_no_profilers_are_left_out(extra: str) -> None:
    rows = [
        launch(0, 1, 2),
        kernel(5, 105, 2),
        {
            **kernel(5, 6, 4, "Stream Wait Event"),
            "category": "cuda_sync", "kind": "wait", "lane": "stream 9 sync", "extra": extra,
        },
    ]  # fmt: skip
    path = find_critical_path(timeline_of(rows), window_ns=(0, 300_000))
    assert us(path.ns_by_cause)["kernel"] == 100


def test_work_right_behind_other_work_waited_for_it() -> None:
    path = find_critical_path(
        timeline_of(
            [
                launch(0, 1, 1),
                collective(0, 5, 405, flow_in=1),
                launch(2, 3, 2),
                kernel(408, 508, 2),
            ]
        ),
        window_ns=(0, 600_000),
    )
    assert us(path.ns_by_cause) == {
        "communication": 400, "kernel": 100, "launch delay": 5, "kernel gap": 3,
    }  # fmt: skip


def test_all_kernels_of_a_graph_are_on_the_path() -> None:
    rows = [call(0, 20, "cudaGraphLaunch", flow_out=7)]
    rows += [kernel(25 + 10 * n, 34 + 10 * n, 7, f"node {n}") for n in range(30)]
    path = find_critical_path(timeline_of(rows), window_ns=(0, 1_000_000))
    names = [one.name for one in path.segments if one.cause == "kernel"]
    assert names == [f"node {n}" for n in range(30)]


def test_across_ranks_the_path_goes_where_the_delay_came_from() -> None:
    job = steady_job(ranks=3, steps=1, compute_us=lambda rank, _step: 900.0 + 300 * (rank == 1))
    path = find_critical_path(job, step=0)
    assert us(path.ns_by_rank) == {1: 1300} or us(path.ns_by_rank) == {0: 100, 1: 1200}
    assert us(path.ns_by_cause) == {"kernel": 1200, "collective transfer": 100}
    stays = find_critical_path(job, step=0, rank=0)
    assert us(stays.ns_by_cause) == {
        "kernel": 900, "waiting for rank 1": 300, "collective transfer": 100,
    }  # fmt: skip


def test_work_from_before_the_window_holds_up_what_is_in_it() -> None:
    rows = [
        launch(0, 1, 1),
        kernel(5, 1005, 1, "earlier"),
        launch(900, 901, 2),
        kernel(1006, 1106, 2, "inside"),
    ]
    path = find_critical_path(timeline_of(rows), window_ns=(800_000, 1_000_000))
    assert us(path.ns_by_cause) == {"before the window": 205, "kernel": 100, "kernel gap": 1}


def test_a_start_long_after_its_launch_is_no_launch_delay() -> None:
    rows = [launch(0, 1, 1), kernel(5000, 5100, 1)]
    path = find_critical_path(timeline_of(rows), window_ns=(0, 10_000))
    assert us(path.ns_by_cause) == {"unexplained wait": 5000, "kernel": 100}


def test_segments_fill_the_window_without_a_hole() -> None:
    path = find_critical_path(steady_job(ranks=4, steps=6, jitter_us=3))
    moment = path.window_ns[0]
    for one in path.segments:
        assert one.start_ns == moment
        moment = one.end_ns
    assert moment == path.window_ns[1]
    assert sum(path.ns_by_cause.values()) == path.total_ns == sum(path.ns_by_name.values())


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        ({"step": 99}, "no step 99"),
        ({"window_ns": (0, 10), "rank": 9}, "rank 9"),
    ],
)
def test_what_is_not_there_is_named(ask: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_critical_path(steady_job(), **ask)


@pytest.fixture(scope="module")
def rank_of(shared: Path) -> Callable[[int], Timeline]:
    folder = shared / "traces" / "modded-nanogpt" / "8rank-h100-2025-12-11"
    return lambda rank: read_kineto(folder / f"rank-{rank}.json.gz")


def test_a_real_graph_timed_again_gives_what_was_observed(
    rank_of: Callable[[int], Timeline],
) -> None:
    job = Timeline.concat(rank_of(rank) for rank in range(8))
    built = build_window_graph(job, dict.fromkeys(job.ranks, job.extent_ns))
    assert built.graph.num_dropped_edges == 0
    assert np.array_equal(compute_graph_times(built.graph).start, built.graph.time_ns)
    path = trace_critical_path(built, rank=0)
    waits = {cause: spent for cause, spent in path.ns_by_cause.items() if "waiting" in cause}
    assert max(waits, key=lambda cause: waits[cause]) == "waiting for rank 1"


def test_a_real_step_has_every_kernel_of_the_way(rank_of: Callable[[int], Timeline]) -> None:
    path = find_critical_path(rank_of(0), step=12)
    moments = [(one.start_ns, one.end_ns) for one in path.segments]
    assert all(one[1] == following[0] for one, following in pairwise(moments))
    assert path.ns_by_cause.get("launch delay", 0) < 0.01 * path.total_ns
