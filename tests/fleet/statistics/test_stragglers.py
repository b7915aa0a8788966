"""Workers beside their peers."""

import numpy as np

from meshwright.fleet.statistics.stragglers import compare_pace, find_stragglers

WORKERS, STEPS = 8, 400


def _times(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    noise = np.random.default_rng(seed).normal(1, 0.02, (STEPS, WORKERS))
    worker = np.tile(np.arange(WORKERS), STEPS)
    return worker, np.repeat(np.arange(STEPS) * 10.0, WORKERS), noise


def test_a_worker_that_becomes_slow_is_found_in_its_windows() -> None:
    worker, time, took = _times()
    took[200:220, 5] *= 1.4
    found = find_stragglers(compare_pace(worker, time, took.ravel(), windows=20))
    assert [(slow.worker, slow.window_index) for slow in found] == [(5, 10)]
    assert 1.35 < found[0].ratio_to_peers < 1.45
    assert found[0].start_s <= 2000 <= found[0].end_s


def test_a_worker_that_is_always_slow_has_not_changed() -> None:
    worker, time, took = _times()
    took[:, 2] *= 1.3
    found = compare_pace(worker, time, took.ravel())
    assert find_stragglers(found) == ()
    assert {slow.worker for slow in find_stragglers(found, changed=0)} == {2}


def test_steps_that_are_long_for_all_count_against_none() -> None:
    worker, time, took = _times()
    took[100:150] *= 3
    assert find_stragglers(compare_pace(worker, time, took.ravel())) == ()


def test_a_worker_may_be_missing_for_a_while() -> None:
    worker, time, took = _times()
    took[:200, 0] = np.nan
    assert find_stragglers(compare_pace(worker, time, took.ravel())) == ()
    assert find_stragglers(compare_pace([], [], [])) == ()
