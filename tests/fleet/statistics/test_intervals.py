"""Windows of samples that agree."""

import numpy as np
import pyarrow as pa

from meshwright.fleet.columns import group_rows
from meshwright.fleet.statistics.intervals import find_idle_intervals, find_intervals


def test_a_window_runs_from_its_first_sample_to_its_last() -> None:
    found = find_intervals(
        [0] * 5, [0, 60, 120, 180, 240], [True, True, True, False, True], gap_s=100
    )
    assert found.start_s.tolist() == [0, 240]
    assert found.end_s.tolist() == [120, 240]
    assert found.num_samples.tolist() == [3, 1]
    assert found.total_hours == 120 / 3600


def test_a_gap_and_another_series_end_a_window() -> None:
    found = find_intervals([0, 0, 0, 1, 1], [0, 60, 600, 660, 720], [True] * 5, gap_s=300)
    assert list(zip(found.series, found.start_s, found.end_s, strict=True)) == [
        (0, 0, 60),
        (0, 600, 600),
        (1, 660, 720),
    ]


def test_samples_come_in_any_order() -> None:
    time = np.arange(100) * 30.0
    holds = np.arange(100) % 10 < 7
    shuffled = np.random.default_rng(1).permutation(100)
    straight = find_intervals(np.zeros(100), time, holds, gap_s=60)
    mixed = find_intervals(np.zeros(100), time[shuffled], holds[shuffled], gap_s=60)
    assert straight.start_s.tolist() == mixed.start_s.tolist()
    assert straight.num_samples.tolist() == mixed.num_samples.tolist() == [7] * 10


def test_only_long_ones_are_kept() -> None:
    found = find_intervals(
        [0] * 4, [0, 60, 120, 180], [True, False, True, True], gap_s=90, length_s=60
    )
    assert found.start_s.tolist() == [120]


def test_a_sample_without_a_value_leaves_a_gap_and_is_not_idle() -> None:
    time = np.arange(5) * 60.0
    nought = [0.0, 0.0, np.nan, 0.0, 0.0]
    assert find_idle_intervals(
        [0] * 5, time, nought, gap_s=150, length_s=0
    ).num_samples.tolist() == [4]
    assert find_idle_intervals(
        [0] * 5, time, nought, gap_s=90, length_s=0
    ).num_samples.tolist() == [2, 2]


def test_nothing_gives_nothing() -> None:
    assert len(find_idle_intervals([], [], []).series) == 0
    assert group_rows().tolist() == []


def test_combinations_are_numbered() -> None:
    node = pa.chunked_array([["a", "a"], ["b", None, None]])
    gpu = pa.array([0, 1, 0, 0, 0])
    assert group_rows(node).tolist() == [0, 0, 1, 2, 2]
    assert group_rows(node, gpu).tolist() == [0, 1, 2, 3, 3]
