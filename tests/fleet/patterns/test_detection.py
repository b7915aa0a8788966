"""What a fleet's patterns tell, on tables that can be checked by eye."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from meshwright.fleet.patterns import (
    FleetFinding,
    find_cases,
    find_inefficiencies,
    finding_to_data,
    list_patterns,
)
from meshwright.fleet.patterns.fleet_pattern import FLEET_FAMILIES
from tests.fleet.patterns.small_fleet import GIB, fleet, held, job, rows, samples

WORK = {"gpu_util": 0.95, "tensor_active": 0.4, "sm_active": 0.8, "dram_active": 0.4,
        "memory_used": 60 * GIB, "memory_total": 80 * GIB}  # fmt: skip
STILL = {"gpu_util": 0.0, "tensor_active": 0.0, "sm_active": 0.0, "dram_active": 0.0,
         "memory_used": 60 * GIB, "memory_total": 80 * GIB}  # fmt: skip


def told(hours: float = 24, **tables: pa.Table) -> dict[str, FleetFinding]:
    return {one.name: one for one in find_inefficiencies(fleet(hours, **tables), lambda _: 2.0)}


def idle_from(hour: float, hours: float) -> dict[str, np.ndarray]:
    before, after = round(60 * hour), round(60 * (hours - hour))
    return {name: np.concatenate([np.full(before, WORK[name]), np.full(after, STILL[name])])
            for name in WORK}  # fmt: skip


def test_nothing_is_told_of_nothing() -> None:
    assert find_inefficiencies(fleet()) == ()


def test_nothing_is_told_of_a_sound_job() -> None:
    one = job(hours=6)
    assert told(jobs=rows("jobs", one), allocations=rows("allocations", *held(one, 0)),
                gpu_samples=samples(6, **WORK)) == {}  # fmt: skip


def test_a_job_that_stays_after_its_work_is_told_with_its_cost_and_owner() -> None:
    one = job(hours=6)
    found = told(
        jobs=rows("jobs", one),
        allocations=rows("allocations", *held(one, 0)),
        gpu_samples=samples(6, **idle_from(4, 6)),
    )
    assert list(found) == ["finished-but-held"]
    only = found["finished-but-held"]
    assert only.gpu_hours == pytest.approx(2, abs=0.05)
    assert only.dollars == pytest.approx(4, abs=0.1)
    assert (only.owner, only.jobs) == ("ada", ("1",))
    assert only.gpu_share == pytest.approx(2 / 6, abs=0.01)


def test_a_gpu_without_samples_is_not_idle() -> None:
    one = job(hours=6)
    sparse = samples(6, **STILL).slice(0, 100)
    assert (
        told(
            jobs=rows("jobs", one),
            allocations=rows("allocations", *held(one, 0)),
            gpu_samples=sparse,
        )
        == {}
    )


def test_a_blank_value_is_not_idle() -> None:
    one = job(hours=6)
    blank = samples(6, **{**STILL, "gpu_util": np.nan, "sm_active": np.nan})
    assert (
        told(
            jobs=rows("jobs", one),
            allocations=rows("allocations", *held(one, 0)),
            gpu_samples=blank,
        )
        == {}
    )


def test_whole_nodes_need_no_record_of_who_had_which_gpu() -> None:
    one = job(hours=6, gpus=2)
    node = {"node": "n1", "since_s": one["start_s"], "state": "up", "gpus": 2}
    parts = pa.concat_tables([samples(6, gpu, **idle_from(3, 6)) for gpu in (0, 1)])
    found = told(jobs=rows("jobs", one), nodes=rows("nodes", node), gpu_samples=parts)
    assert found["finished-but-held"].gpu_hours == pytest.approx(6, abs=0.1)


def test_of_a_part_of_a_node_nothing_is_assumed() -> None:
    one = job(hours=6, gpus=1)
    node = {"node": "n1", "since_s": one["start_s"], "state": "up", "gpus": 2}
    parts = pa.concat_tables([samples(6, gpu, **STILL) for gpu in (0, 1)])
    assert told(jobs=rows("jobs", one), nodes=rows("nodes", node), gpu_samples=parts) == {}


def test_one_busy_gpu_of_four_is_told_with_the_number_to_ask_for() -> None:
    one = job(hours=4, gpus=4)
    parts = [samples(4, 0, **WORK), *(samples(4, gpu, **STILL) for gpu in (1, 2, 3))]
    found = told(
        jobs=rows("jobs", one),
        allocations=rows("allocations", *held(one, 0, 1, 2, 3)),
        gpu_samples=pa.concat_tables(parts),
    )
    assert found["some-gpus-unused"].gpu_hours == pytest.approx(12)
    assert found["some-gpus-unused"].remedy.startswith("--gres=gpu:1 ")


def test_an_hour_is_claimed_once() -> None:
    one = job(hours=10, cpus=2.0, cpu_s=2.0 * 36000, gpus=1)
    slow = samples(10, **{**WORK, "gpu_util": 0.2, "tensor_active": 0.02, "sm_active": 0.1})
    found = told(
        jobs=rows("jobs", one), allocations=rows("allocations", *held(one, 0)), gpu_samples=slow
    )
    assert set(found) == {"cpu-starved"}
    assert (found["cpu-starved"].gpu_hours or 0) <= 10


def test_memory_that_nobody_holds_is_told_of_known_nodes_only() -> None:
    one = job(hours=2)
    parts = samples(6, **{**STILL, "memory_used": 20 * GIB})
    known = told(
        jobs=rows("jobs", one), allocations=rows("allocations", *held(one, 0)), gpu_samples=parts
    )
    assert known["stray-processes"].gpu_hours == pytest.approx(4, abs=0.1)
    assert "1 (train) of ada" in known["stray-processes"].evidence[1]
    other = job("2", hours=5, user="bob")
    unknown = told(
        jobs=rows("jobs", one, other),
        allocations=rows("allocations", *held(one, 0)),
        gpu_samples=parts,
    )
    assert "stray-processes" not in unknown


def test_five_crashes_in_a_row_are_a_loop_and_four_are_not() -> None:
    runs = [job(str(at), hours=0.2, gpus=8, after=at, state="failed", exit_code=1)
            for at in range(5)]  # fmt: skip
    assert told(jobs=rows("jobs", *runs))["crash-loop"].gpu_hours == pytest.approx(8)
    assert "crash-loop" not in told(jobs=rows("jobs", *runs[:4]))
    mended = [*runs[:3], job("9", hours=1, gpus=8, after=3), *runs[3:]]
    assert "crash-loop" not in told(jobs=rows("jobs", *mended))


def test_what_a_failure_lost_is_counted_from_the_last_checkpoint() -> None:
    one = job(hours=10, gpus=8, state="node_fail")
    saved = {"job": "1", "attempt": 0, "phase": "checkpoint", "start_s": one["start_s"] + 28000,
             "end_s": one["start_s"] + 28800}  # fmt: skip
    error = {"node": "n1", "gpu": 3, "time_s": one["end_s"] - 300, "kind": "xid", "code": 79}
    tables = {
        "jobs": rows("jobs", one),
        "allocations": rows("allocations", *held(one, *range(8))),
        "events": rows("events", error),
    }
    found = told(progress=rows("progress", saved), **tables)
    assert found["gpu-errors-before-failure"].gpu_hours == pytest.approx(16)
    assert found["gpu-errors-before-failure"].owner == "operators"
    unknown = told(**tables)["gpu-errors-before-failure"]
    assert unknown.gpu_hours == pytest.approx(80)
    assert "at most all of it" in unknown.evidence[-1]


def test_an_xid_of_a_program_is_its_users_matter() -> None:
    one = job(hours=2, state="failed", exit_code=1)
    error = {"node": "n1", "gpu": 0, "time_s": one["end_s"] - 30, "kind": "xid", "code": 31}
    found = told(
        jobs=rows("jobs", one),
        allocations=rows("allocations", *held(one, 0)),
        events=rows("events", error),
    )
    assert found["application-fault"].owner == "ada"
    assert "gpu-errors-before-failure" not in found


def test_findings_without_hours_come_last_and_have_no_price() -> None:
    wide = job(hours=4, gpus=2, nodes=["n1", "n2"])
    node = {"since_s": wide["start_s"], "state": "up", "gpus": 8}
    late = {"node": "n3", **node, "state": "down"}
    found = find_inefficiencies(
        fleet(72, jobs=rows("jobs", wide),
              nodes=rows("nodes", {"node": "n1", **node}, {"node": "n2", **node}, late)),
        lambda _: 2.0,
    )  # fmt: skip
    assert [one.name for one in found] == ["forgotten-drain", "spread-job"]
    assert found[0].gpu_hours == pytest.approx(8 * 72)
    assert found[-1].gpu_hours is None
    assert found[-1].dollars is None
    assert found[-1].remedy == "--nodes=1 --gpus-per-node=2"


def test_only_the_time_asked_for_counts() -> None:
    one = job(hours=10)
    found = told(
        5,
        jobs=rows("jobs", one),
        allocations=rows("allocations", *held(one, 0)),
        gpu_samples=samples(5, **STILL),
    )
    assert found["idle-allocation"].gpu_hours == pytest.approx(5, abs=0.1)


def test_parts_of_the_samples_are_as_good_as_all_of_them() -> None:
    from meshwright.fleet.patterns import build_fleet_data
    from tests.fleet.patterns.small_fleet import BEGIN_S

    one, other = job(hours=6), job("2", hours=6, nodes=["n2"], user="bob")
    tables = {
        "jobs": rows("jobs", one, other),
        "allocations": rows("allocations", *held(one, 0), *held(other, 0, node="n2")),
    }
    first, second = samples(6, **STILL), samples(6, 0, "n2", **idle_from(2, 6))
    whole = fleet(**tables, gpu_samples=pa.concat_tables([first, second]))
    parted = build_fleet_data(
        tables, since_s=BEGIN_S, until_s=BEGIN_S + 86400, samples=[second, first],
        nodes=pa.table({"cluster": ["c", "c"], "node": ["n1", "n2"]}),
    )  # fmt: skip
    assert find_inefficiencies(whole) == find_inefficiencies(parted)


def test_what_is_told_is_plain_data() -> None:
    one = job(hours=6)
    found = find_inefficiencies(fleet(jobs=rows("jobs", one), allocations=rows("allocations",
                                                                               *held(one, 0)),
                       gpu_samples=samples(6, **STILL)))  # fmt: skip
    data = finding_to_data(found[0])
    assert set(data) == {
        "name", "title", "family", "evidence", "gpu_share", "cost_basis", "remedy", "gpu_hours",
        "dollars", "owner", "team", "cases", "jobs", "users", "nodes",
    }  # fmt: skip


def test_every_pattern_says_all_there_is_to_say() -> None:
    known = list_patterns()
    assert len(known) >= 25
    names = {one.name for one in known}
    for one in known:
        assert one.family in FLEET_FAMILIES
        assert all((one.title, one.rule, one.remedy))
        assert one.cost_basis.split(":")[0].split(" ")[0] in {"measured", "estimated", "not"}
        assert set(one.explained_by) <= names


def test_cases_of_tables_with_nothing_but_nulls() -> None:
    blank = {
        name: rows(name, {}) for name in ("jobs", "allocations", "nodes", "events", "progress")
    }
    assert find_cases(fleet(**blank)) == ()


def test_partitions_of_two_clusters_are_not_one() -> None:
    small = job("1", hours=20, gpus=1, partition="p")
    wide = job("2", hours=2, gpus=8, partition="p", after=10, submit_s=small["start_s"])
    node = {"since_s": small["start_s"], "state": "up", "gpus": 8, "partitions": ["p"]}
    here = [{"node": "n1", **node}, {"node": "n2", **node}]
    tables = {
        "jobs": rows("jobs", small, {**small, "job": "3", "nodes": ["n2"]}, wide),
        "allocations": rows(
            "allocations", *held(small, 0), *held({**small, "job": "3"}, 0, node="n2")
        ),
    }
    split = told(nodes=rows("nodes", *here), **tables)
    assert split["queue-starved-by-fragmentation"].gpu_hours == pytest.approx(80, abs=1)
    free = {"node": "n9", **node, "cluster": "other"}
    assert "queue-starved-by-fragmentation" in told(nodes=rows("nodes", *here, free), **tables)
    assert "queue-starved-by-fragmentation" not in told(
        nodes=rows("nodes", *here, {**free, "cluster": "c"}), **tables
    )


SMALL = {"gpu_util": 0.3, "memory_used": 4 * GIB, "memory_total": 140 * GIB}
"""Busy for a third of the time, in little of the memory of a large GPU."""


@pytest.mark.parametrize(
    ("levels", "is_told"),
    [
        ({"sm_active": 0.05, "dram_active": 0.02}, True),  # narrow kernels
        ({"sm_active": 0.25, "dram_active": 0.02}, False),  # wide ones, seldom
        ({"sm_active": 0.05, "dram_active": 0.2}, False),  # much traffic
        ({"sm_active": 0.05, "dram_active": 0.02, "memory_used": 20 * GIB}, False),
        ({}, False),  # who knows
        ({"gpu_util": 0.15}, True),
    ],
)
def test_a_gpu_is_too_powerful_where_a_slice_would_do(
    levels: dict[str, float], is_told: bool
) -> None:
    one = job(hours=6)
    found = told(jobs=rows("jobs", one), allocations=rows("allocations", *held(one, 0)),
                 gpu_samples=samples(6, **SMALL | levels))  # fmt: skip
    assert ("mig-candidate" in found) == is_told
    if is_told:
        assert "1g.18gb" in found["mig-candidate"].remedy


@pytest.mark.parametrize(
    ("last", "is_told"),
    [
        ({"hours": 2.0}, True),
        ({"hours": 5.0}, False),  # half as long again is more than half of the limit
        ({"hours": 12.0, "state": "timeout"}, False),
        ({"hours": 9.0, "state": "failed"}, False),
    ],
)
def test_a_limit_is_too_long_where_no_run_needs_half_of_it(
    last: dict[str, Any], is_told: bool
) -> None:
    short = [job(str(at), 1, after=at, time_limit_s=12 * 3600.0) for at in range(5)]
    found = told(jobs=rows("jobs", *short, job("9", after=6, time_limit_s=12 * 3600.0, **last)))
    assert ("time-limit-far-over" in found) == is_told
    if is_told:
        assert found["time-limit-far-over"].remedy == "--time=3:00:00"
