"""What jobs come to."""

import numpy as np
import pytest

from meshwright.fleet.sources.source import make_rows
from meshwright.fleet.validation.job_summary import (
    compute_gpu_time_share,
    merge_attempts,
    summarize_jobs,
)

TABLE = make_rows(
    "jobs",
    {
        "cluster": ["c"] * 5,
        "job": ["a", "b", "b", "d", "e"],
        "attempt": [0, 1, 0, 0, 0],
        "gpus": [8.0, 1.0, 1.0, 0.0, 1.0],
        "submit_s": [0.0, 10.0, 10.0, 0.0, 0.0],
        "start_s": [100.0, 300.0, 20.0, 5.0, None],
        "end_s": [200.0, 340.0, 80.0, 65.0, None],
        "state": ["completed", "cancelled", "requeued", "completed", "failed"],
    },
)


def test_attempts_are_of_one_job() -> None:
    jobs = merge_attempts(TABLE)
    assert jobs.gpus.tolist() == [8, 1, 0, 1]
    assert jobs.run_s[:3].tolist() == [100, 100, 60]
    assert np.isnan(jobs.run_s[3])
    assert jobs.wait_s[:3].tolist() == [100, 10, 5]
    assert jobs.state.tolist() == ["completed", "cancelled", "completed", "failed"]


def test_a_summary_counts_times_and_ends() -> None:
    found = summarize_jobs(merge_attempts(TABLE))
    assert (found["job_num"], found["gpu_job_num"], found["cpu_job_num"]) == (4, 3, 1)
    assert found["avg_run_time_gpu"] == 100
    assert found["med_que_time_gpu"] == 55
    assert found["complete_rate"] == 0.5
    assert found["fail_rate_gpu"] == pytest.approx(1 / 3)
    assert found["complete_gpu_time"] == 800
    assert found["cancel_rate_gpu_time"] == pytest.approx(100 / 900)
    assert found["gpu_hours"] == 0.25
    assert found["max_gpu"] == 8


def test_large_jobs_have_a_share_of_gpu_time() -> None:
    jobs = merge_attempts(TABLE)
    assert compute_gpu_time_share(jobs, 8) == pytest.approx(8 / 9)
    assert compute_gpu_time_share(jobs, 1, 2) == pytest.approx(1 / 9)


def test_no_jobs_are_nothing() -> None:
    assert summarize_jobs(merge_attempts(TABLE.slice(0, 0))) == {
        "job_num": 0,
        "cpu_job_num": 0,
        "gpu_job_num": 0,
    }
