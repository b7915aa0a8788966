"""Where GPU-hours end, case by case."""

from typing import Any

import pyarrow as pa
import pytest

from meshwright.fleet.account import build_account, to_gpu_hours
from meshwright.fleet.account.account import GpuHourAccount
from meshwright.fleet.account.buckets import AccountCell
from tests.fleet.account.rows import DAY, HOUR, held, jobs, nodes, progress, rollups


def job(name: str, start: float, end: float | None, gpus: float = 8, **more: Any) -> dict[str, Any]:
    return {"job": name, "start_s": start, "end_s": end, "gpus": gpus, "nodes": ["n1"], **more}


def account_of(
    work: pa.Table, *there: dict[str, Any], until: float = 10 * HOUR, **more: Any
) -> GpuHourAccount:
    return build_account(work, nodes(*there) if there else None, since_s=0, until_s=until, **more)


def told(found: GpuHourAccount) -> dict[str, float]:
    """Buckets that hold anything, in GPU-hours."""
    return {
        name: round(to_gpu_hours(amount), 6)
        for name, amount in found.sum_buckets().items()
        if amount
    }


def test_a_job_that_nothing_measured_is_not_called_productive_and_the_rest_had_no_demand() -> None:
    found = account_of(jobs(job("1", 0, 4 * HOUR)), {"node": "n1"})
    assert told(found) == {"unmeasured": 32, "no_demand": 48}
    assert (
        to_gpu_hours(found.sum_cells()[AccountCell("unmeasured", "unknown")]) == 32
    )  # nothing tells what it did
    assert sum(found.sum_buckets().values()) == found.capacity


def test_a_failed_attempt_without_a_known_checkpoint_is_lost_as_a_whole() -> None:
    found = account_of(jobs(job("1", 0, 10 * HOUR, state="failed")), {"node": "n1"})
    assert to_gpu_hours(found.sum_cells()[AccountCell("lost_work", "unknown")]) == 80


def test_of_a_failed_attempt_only_what_no_checkpoint_kept_is_lost() -> None:
    work = jobs(job("1", 0, 10 * HOUR, state="node_fail"))
    rows = progress(
        ("1", 0, HOUR, "startup"),
        ("1", HOUR, 10 * HOUR, "productive"),
        ("1", 5 * HOUR, 6 * HOUR, "checkpoint"),
        ("1", 9.5 * HOUR, 10 * HOUR, "checkpoint"),  # broken off by the failure
    )
    found = account_of(work, {"node": "n1"}, progress=rows)
    assert told(found) == {"startup": 8, "productive": 32, "checkpoint": 12, "lost_work": 28}
    assert found.sum_cells()[AccountCell("lost_work", "unknown")] == 0


def test_whoever_tells_what_was_lost_is_believed() -> None:
    work = jobs(job("1", 0, 10 * HOUR, state="failed"))
    rows = progress(("1", 0, 9 * HOUR, "productive"), ("1", 9 * HOUR, 10 * HOUR, "lost_work"))
    found = account_of(work, {"node": "n1"}, progress=rows)
    assert told(found) == {"productive": 72, "lost_work": 8}


def test_a_cancelled_job_loses_nothing() -> None:
    found = account_of(jobs(job("1", 0, 10 * HOUR, state="cancelled")), {"node": "n1"})
    assert told(found) == {"unmeasured": 80}


def test_gpus_of_a_node_that_is_down_are_down_whoever_claims_them() -> None:
    found = account_of(
        jobs(job("1", 0, 10 * HOUR)),
        {"node": "n1", "until_s": 6 * HOUR},
        {"node": "n1", "since_s": 6 * HOUR, "state": "down"},
    )
    assert told(found) == {"unmeasured": 48, "down": 32}
    assert to_gpu_hours(found.oversubscribed) == 32


def test_a_draining_node_still_runs_what_it_has() -> None:
    found = account_of(jobs(job("1", 0, 10 * HOUR, gpus=4)), {"node": "n1", "state": "draining"})
    assert told(found) == {"unmeasured": 40, "draining": 40}


def test_reserved_and_unknown_gpus_are_told_apart() -> None:
    found = account_of(jobs(), {"node": "n1", "state": "reserved"}, {"node": "n2", "state": "odd"})
    assert told(found) == {"reserved": 80, "unknown": 80}


def test_free_gpus_that_no_placement_joins_are_fragmented() -> None:
    # Four GPUs are free on each of two nodes; somebody waits for eight on one.
    found = account_of(
        jobs(
            job("1", 0, 10 * HOUR, gpus=4),
            job("2", 0, 10 * HOUR, gpus=4, nodes=["n2"]),
            {"job": "3", "submit_s": 0, "gpus": 8, "num_nodes": 1, "state": "pending"},
        ),
        {"node": "n1"},
        {"node": "n2"},
    )
    assert told(found) == {"unmeasured": 80, "fragmented": 80}


@pytest.mark.parametrize(
    ("waiting", "bucket"),
    [
        ({"gpus": 4, "num_nodes": 1}, "queue_order"),
        ({"gpus": 4, "num_nodes": 1, "reason": "QOSMaxGRESPerUser"}, "quota"),
        ({"gpus": 16, "num_nodes": 2}, "insufficient_gpus"),
        ({"gpus": 4, "num_nodes": 1, "reason": "Dependency"}, "no_demand"),
    ],
)
def test_why_gpus_are_free(waiting: dict[str, Any], bucket: str) -> None:
    waits = {"job": "2", "submit_s": 0, "state": "pending", **waiting}
    found = account_of(jobs(job("1", 0, 10 * HOUR, gpus=4), waits), {"node": "n1"})
    assert told(found) == {"unmeasured": 40, bucket: 40}


def test_a_small_demand_explains_no_more_than_it_asks_for() -> None:
    waits = {"job": "2", "submit_s": 0, "state": "pending", "gpus": 1, "reason": "AssocGrpGRES"}
    found = account_of(jobs(waits), {"node": "n1"})
    assert told(found) == {"quota": 10, "no_demand": 70}


@pytest.mark.parametrize(("submit_s", "evidence"), [(0.0, "nodes"), (None, "unknown")])
def test_that_nobody_waited_is_known_where_waits_are_told(
    submit_s: float | None, evidence: str
) -> None:
    row = {**job("1", 0, 4 * HOUR), "submit_s": submit_s}
    found = account_of(jobs(row), {"node": "n1"})
    assert to_gpu_hours(found.sum_cells()[AccountCell("no_demand", evidence)]) == 48


def test_without_nodes_what_was_held_is_all_there_was() -> None:
    found = account_of(jobs(job("1", 0, 4 * HOUR), job("2", 0, 4 * HOUR, nodes=None)))
    assert told(found) == {"unmeasured": 64}
    assert found.inferred_capacity == found.capacity


def test_told_gpus_of_a_cluster_stand_for_its_nodes() -> None:
    found = account_of(jobs(job("1", 0, 4 * HOUR, nodes=None)), gpus={"c": 8})
    assert told(found) == {"unmeasured": 32, "no_demand": 48}
    assert found.inferred_capacity == 0


def test_claims_beyond_what_there_is_are_cut_alike() -> None:
    found = account_of(
        jobs(job("1", 0, 10 * HOUR), job("2", 0, 10 * HOUR), job("3", 0, 10 * HOUR)),
        {"node": "n1"},
    )
    assert told(found) == {"unmeasured": 80}
    assert to_gpu_hours(found.oversubscribed) == pytest.approx(160)
    assert found.cells_by_attempt.sum(axis=1) == pytest.approx([found.capacity / 3] * 3, abs=2)


def test_an_attempt_ends_where_the_next_begins() -> None:
    found = account_of(
        jobs(
            job("1", 0, 10 * HOUR, state="requeued"),
            job("1", 4 * HOUR, 10 * HOUR, attempt=1),
        ),
        {"node": "n1"},
    )
    assert told(found) == {"unmeasured": 48, "lost_work": 32}


def test_a_running_job_holds_until_a_later_look_does_not_show_it() -> None:
    work = jobs(
        job("1", 0, None, gpus=2, state="running", seen_s=6 * HOUR),
        job("2", 0, None, gpus=2, state="running", seen_s=9.5 * HOUR),
        job("3", 0, None, gpus=2, state="running"),
        job("4", 0, None, gpus=2, state="failed"),
    )
    found = account_of(work, {"node": "n1"})
    assert told(found) == {"unmeasured": 12 + 20 + 20, "no_demand": 28}
    assert found.data_warnings["attempts that ended nobody knows when, left out"] == 1


def test_nobody_is_taken_to_run_for_days_after_the_last_look() -> None:
    work = jobs(job("1", 0, None, state="running", seen_s=HOUR))
    assert told(account_of(work, {"node": "n1"}, until=3 * DAY))["unmeasured"] == 8 * 25


def test_samples_tell_idle_gpus_from_busy_ones_and_start_up_from_idling() -> None:
    bins = [300.0 * at for at in range(12)]
    seen = rollups(
        *(
            ("n1", gpu, time, 0.9 if gpu == 0 and time >= 600 else 0.0)
            for gpu in (0, 1)
            for time in bins
        )
    )
    whose = held(
        {"job": "1", "node": "n1", "gpu": 0, "start_s": 0.0},
        {"job": "1", "node": "n1", "gpu": 1, "start_s": 0.0},
    )
    found = account_of(
        jobs(job("1", 0, 2 * HOUR, gpus=2)), {"node": "n1", "gpus": 2},
        allocations=whose, rollups=seen, until=2 * HOUR,
    )  # fmt: skip
    assert told(found) == pytest.approx(
        {"startup": 1 / 6, "idle": 1, "productive": 5 / 6, "unmeasured": 2}, 1e-5
    )
    cells = found.sum_cells()
    assert to_gpu_hours(cells[AccountCell("productive", "samples")]) == pytest.approx(5 / 6)
    assert (
        to_gpu_hours(cells[AccountCell("unmeasured", "unknown")]) == 2
    )  # the second hour has no sample
    assert found.tensor[0].sum() / found.tensor[1].sum() == pytest.approx(0.45)


def test_without_indexes_busy_gpus_count_as_held_first() -> None:
    seen = rollups(
        *(("n1", gpu, 300.0 * at, float(gpu < 3)) for gpu in range(8) for at in range(12))
    )
    found = account_of(jobs(job("1", 0, HOUR, gpus=4)), {"node": "n1"}, rollups=seen, until=HOUR)
    assert told(found) == {"productive": 3, "idle": 1, "no_demand": 4}


def test_what_accounting_keeps_of_activity_speaks_where_nothing_else_does() -> None:
    work = jobs(job("1", 0, HOUR, gpus=4, gpu_util=0.0), job("2", 0, HOUR, gpus=4, gpu_util=0.8))
    found = account_of(work, {"node": "n1"}, until=HOUR)
    assert told(found) == {"productive": 4, "idle": 4}
    assert found.sum_cells()[AccountCell("unmeasured", "unknown")] == 0


def test_jobs_that_only_telemetry_knows_are_counted() -> None:
    whose = held(
        *({"job": "pod", "node": "n1", "gpu": gpu, "start_s": 0.0, "end_s": HOUR} for gpu in (0, 1))
    )
    found = account_of(jobs(), {"node": "n1"}, allocations=whose, until=HOUR)
    assert told(found) == {"unmeasured": 2, "no_demand": 6}


def test_a_gpu_that_two_jobs_claim_is_one_gpu() -> None:
    whose = held(
        {"job": "1", "node": "n1", "gpu": 0, "start_s": 0.0},
        {"job": "2", "node": "n1", "gpu": 0, "start_s": 0.0},
    )
    work = jobs(job("1", 0, HOUR, gpus=1), job("2", 0, HOUR, gpus=1))
    found = account_of(work, {"node": "n1"}, allocations=whose, until=HOUR)
    assert told(found) == {"unmeasured": 1, "no_demand": 7}


def test_days_add_up_to_the_window() -> None:
    found = account_of(jobs(job("1", 0.5 * DAY, 2.25 * DAY)), {"node": "n1"}, until=3 * DAY)
    unmeasured = [
        to_gpu_hours(sum(v for c, v in s.cells.items() if c.bucket == "unmeasured"))
        for s in found.periods
    ]
    assert unmeasured == [96, 192, 48]


def test_gpus_that_accounting_does_not_keep_are_those_that_were_held() -> None:
    # Slurm keeps no GPUs unless AccountingStorageTRES names them.
    whose = held(*({"job": "1", "node": "n1", "gpu": gpu, "start_s": 0.0} for gpu in (0, 1, 1)))
    work = jobs(job("1", 0, HOUR) | {"gpus": None})
    found = account_of(work, {"node": "n1"}, allocations=whose, until=HOUR)
    assert told(found) == {"unmeasured": 2, "no_demand": 6}


def test_roll_ups_of_days_may_differ_in_length() -> None:
    def seen(since_s: float, until_s: float) -> tuple[pa.Table, int]:
        width = 3600 if since_s < DAY else 300
        times = [float(at) for at in range(int(since_s), int(until_s), width)]
        return rollups(*(("n1", gpu, time, 0.0) for gpu in range(8) for time in times)), width

    found = account_of(jobs(job("1", 0, 2 * DAY)), {"node": "n1"}, rollups=seen, until=2 * DAY)
    assert told(found) == {"idle": 384}


def test_who_waits_for_one_kind_of_gpu_finds_no_other() -> None:
    waits = {"job": "2", "submit_s": 0, "state": "pending", "gpus": 4, "gpu_kind": "A100"}
    there = {"node": "n1", "gpu_kind": "a100"}, {"node": "n2", "gpu_kind": "v100"}
    full = account_of(jobs(job("1", 0, 10 * HOUR, gpu_kind="a100"), waits), *there)
    assert told(full) == {"unmeasured": 80, "no_demand": 80}
    half = account_of(jobs(job("1", 0, 10 * HOUR, 6, gpu_kind="a100"), waits), *there)
    assert told(half) == {"unmeasured": 60, "insufficient_gpus": 20, "no_demand": 80}


def test_a_job_of_no_known_node_or_kind_may_have_been_anywhere() -> None:
    there = {"node": "n1", "gpu_kind": "a100"}, {"node": "n2", "gpu_kind": "v100"}
    found = account_of(jobs(job("1", 0, 10 * HOUR, 16, nodes=None)), *there)
    assert told(found) == {"unmeasured": 160}


def test_jobs_of_no_cluster_are_counted() -> None:
    found = account_of(jobs(job("1", 0, HOUR, nodes=None, cluster=None)))
    assert told(found) == {"unmeasured": 8}


def test_a_node_is_there_from_the_first_job_on_it() -> None:
    work = jobs(job("1", 2 * HOUR, 4 * HOUR))
    found = account_of(work, {"node": "n1", "since_s": 8 * HOUR})
    assert told(found) == {"unmeasured": 16, "no_demand": 48}
    assert to_gpu_hours(found.assumed_uptime) == 48
    assert (found.inferred_capacity, found.peak_gpus) == (0, 8)


def test_it_is_known_from_when_on_anything_is() -> None:
    late = account_of(jobs(job("1", 8 * HOUR, 9 * HOUR)), {"node": "n1", "since_s": 6 * HOUR})
    assert (late.first_known_ms, late.first_job_ms) == (6 * HOUR * 1e3, 8 * HOUR * 1e3)
    waiting = jobs(job("1", 8 * HOUR, 9 * HOUR, submit_s=7 * HOUR))
    assert account_of(waiting, {"node": "n1"}).first_job_ms == 7 * HOUR * 1e3
    early = account_of(jobs(job("1", -HOUR, HOUR)), {"node": "n1"})
    assert (early.first_known_ms, early.first_job_ms) == (0, 0)
    nobody = account_of(jobs(), {"node": "n1"})
    assert (nobody.first_known_ms, nobody.first_job_ms) == (0, 10 * HOUR * 1e3)
