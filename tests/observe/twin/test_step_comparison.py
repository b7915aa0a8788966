"""Two timelines of a step: same order or the first difference, bubbles, and what takes longer."""

import pytest

from meshwright.errors import InputError
from meshwright.observe.twin.step_comparison import compare_steps
from meshwright.timeline import Timeline

Row = tuple[int, str, int, float, float]
"""Rank, pass, microbatch, start, end."""

TWO = (
    (0, "forward", 0, 0.0, 1.0),
    (1, "forward", 0, 1.0, 2.0),
    (1, "backward", 0, 2.0, 4.0),
    (0, "backward", 0, 4.0, 6.0),
)
"""Two stages, one microbatch: each rank is in passes for 3 of 6 seconds."""


def timeline(
    *rows: Row, step_s: float = 7.0, lanes: tuple[str, ...] = (), replicas: int = 1
) -> Timeline:
    rank, name, microbatch, start, end = zip(*rows, strict=True)
    return Timeline.from_columns(
        {
            "rank": list(rank),
            "process": "host",
            "lane": list(lanes) or "forward-backward",
            "kind": "host",
            "name": list(name),
            "stage": [one // replicas for one in rank],
            "microbatch": list(microbatch),
            "start_ns": [round(one * 1e9) for one in start],
            "duration_ns": [round((b - a) * 1e9) for a, b in zip(start, end, strict=True)],
            "extra": [f'{{"chunk":{one // replicas},"layers":[0,1]}}' for one in rank],
        },
        source="simulated",
        metadata={"step_s": repr(step_s)},
    )


def test_bubble_is_the_share_of_the_pass_phase_without_a_pass() -> None:
    found = compare_steps(timeline(*TWO), timeline(*TWO))
    assert found.predicted.bubble_share == pytest.approx(0.5)
    assert found.predicted.passes_s == pytest.approx(3.0)
    assert found.predicted.outside_passes_s == pytest.approx(1.0)
    assert found.is_within_tolerance


def test_a_replica_that_is_slower_makes_no_bubble_for_the_other() -> None:
    quick = tuple((2 * r, n, m, a, b) for r, n, m, a, b in TWO)
    slow = tuple((2 * r + 1, n, m, 2 * a, 2 * b) for r, n, m, a, b in TWO)
    both = timeline(*quick, *slow, step_s=14.0, replicas=2)
    found = compare_steps(timeline(*TWO), both).measured
    assert found.bubble_share == pytest.approx(0.5)
    assert found.passes_s == pytest.approx(4.5)
    assert found.outside_passes_s == pytest.approx(5.0)  # 8 s for one replica, 2 s for the other


def test_passes_side_by_side_count_once() -> None:
    rows = ((0, "forward", 1, 0.0, 2.0), (0, "backward", 0, 0.0, 2.0), (0, "backward", 1, 3.0, 4.0))
    both = timeline(
        *rows, lanes=("forward-backward", "forward-backward overlapped", "forward-backward")
    )
    found = compare_steps(both, both)
    assert found.predicted.bubble_share == pytest.approx(0.25)
    assert not found.order_difference
    assert [(one.name, one.predicted_s) for one in found.pass_durations] == [("backward", 1.0)]


def test_first_pass_in_another_order_is_named() -> None:
    swapped = (TWO[0], TWO[1], (1, "backward", 1, 2.0, 4.0), TWO[3])
    found = compare_steps(timeline(*TWO), timeline(*swapped))
    assert "pass 1 of rank 1 is backward of microbatch 1 in chunk 1" in found.order_difference
    assert "predicted was backward of microbatch 0" in found.order_difference
    assert not found.is_within_tolerance


def test_missing_pass_is_a_difference() -> None:
    found = compare_steps(timeline(*TWO), timeline(*TWO[:3]))
    assert "pass 1 of rank 0 is missing" in found.order_difference


def test_all_measured_ranks_are_held_against_the_one_of_their_stage() -> None:
    wanted = timeline((0, "forward", 0, 0.0, 1.0), (0, "backward", 0, 1.0, 2.0))
    columns = {
        "rank": [0, 0, 1, 1],
        "process": "host",
        "lane": "forward-backward",
        "kind": "host",
        "name": ["forward", "backward", "backward", "forward"],
        "stage": 0,
        "microbatch": 0,
        "start_ns": [0, 10**9, 0, 10**9],
        "duration_ns": 10**9,
        "extra": '{"chunk":0,"layers":[0,1]}',
    }
    found = compare_steps(wanted, Timeline.from_columns(columns, source="measured"))
    assert found.order_difference.startswith("pass 0 of rank 1")


def test_errors_are_told_in_points_and_shares() -> None:
    slow = tuple((r, n, m, 2 * a, 2 * b) for r, n, m, a, b in TWO)
    found = compare_steps(timeline(*TWO), timeline(*slow, step_s=14.0))
    assert found.step_error == pytest.approx(-0.5)
    assert found.bubble_points == pytest.approx(0.0)
    assert [(one.name, one.num_passes) for one in found.pass_durations] == [
        ("forward", 2),
        ("backward", 2),
    ]
    assert found.pass_durations[1].measured_s == pytest.approx(
        2 * found.pass_durations[1].predicted_s
    )
    assert not found.is_within_tolerance


def test_step_is_the_whole_extent_where_nothing_says_it() -> None:
    bare = timeline(*TWO)
    bare.metadata.clear()
    assert compare_steps(bare, timeline(*TWO)).predicted.step_s == pytest.approx(6.0)


def test_timelines_of_different_layouts_are_refused() -> None:
    with pytest.raises(InputError, match="stage 1 has passes in one of the timelines only"):
        compare_steps(timeline(*TWO), timeline(TWO[0], TWO[3]))


def test_timeline_without_passes_is_refused() -> None:
    with pytest.raises(InputError, match="no passes"):
        compare_steps(Timeline.empty(), timeline(*TWO))
