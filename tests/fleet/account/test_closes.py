"""Whatever rows say, every GPU-hour is in one bucket and none is negative."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.fleet.account import build_account
from meshwright.fleet.account.ticks import PARTS_PER_GPU
from meshwright.fleet.tables import JOB_PHASES, JOB_STATES, NODE_STATES
from tests.fleet.account.rows import DAY, HOUR, held, jobs, nodes, progress, rollups

SINCE, UNTIL = 0.25 * DAY, 2.5 * DAY
NODES = ("n1", "n2", "n3", "elsewhere")

times = st.none() | st.floats(-DAY, 4 * DAY) | st.sampled_from([SINCE, UNTIL, DAY, float("nan")])
gpus = st.none() | st.sampled_from([0.0, 0.25, 1 / 3, 0.5, 1, 2, 4, 8, 9, 16, 300.0, -1.0])
job_rows = st.fixed_dictionaries(
    {
        "cluster": st.sampled_from(["c", "c", "c", "d", None]),
        "job": st.sampled_from(["1", "2", "3", "4", "5", "6"]),
        "attempt": st.sampled_from([0, 0, 1, 2, None]),
        "state": st.sampled_from([*JOB_STATES, None]),
        "partition": st.sampled_from(["gpu", "long", "other", "gpu,long", None]),
        "reason": st.sampled_from([None, "Resources", "QOSMaxGRESPerUser", "Dependency"]),
        "submit_s": times, "eligible_s": times, "start_s": times, "end_s": times, "seen_s": times,
        "gpus": gpus,
        "num_nodes": st.sampled_from([None, 0, 1, 2, 40]),
        "nodes": st.none() | st.lists(st.sampled_from(NODES), max_size=3),
        "gpu_util": st.sampled_from([None, 0.0, 0.4]),
        "gpu_kind": st.sampled_from([None, "a100", "V100"]),
    }
)  # fmt: skip
node_rows = st.fixed_dictionaries(
    {
        "cluster": st.sampled_from(["c", "c", "c", "d"]),
        "node": st.sampled_from(NODES[:3]),
        "since_s": times, "until_s": times, "seen_s": times,
        "state": st.sampled_from([*NODE_STATES, None]),
        "gpus": st.sampled_from([None, 0, 1, 8]),
        "gpu_kind": st.sampled_from([None, "a100", "v100"]),
        "partitions": st.sampled_from([None, [], ["gpu"], ["long"], ["gpu", "long"]]),
    }
)  # fmt: skip
held_rows = st.fixed_dictionaries(
    {
        "job": st.sampled_from(["1", "2", "stranger"]),
        "node": st.sampled_from(NODES),
        "gpu": st.sampled_from([None, 0, 1]),
        "start_s": times, "end_s": times,
        "gpu_fraction": st.sampled_from([None, 1.0, 0.5, 3.0]),
    }
)  # fmt: skip
told_rows = st.tuples(
    st.sampled_from(["1", "2", "3", "nobody"]), times, times, st.sampled_from([*JOB_PHASES, "odd"])
)
seen_rows = st.tuples(
    st.sampled_from(NODES), st.sampled_from([0, 1, 7]),
    st.integers(0, 900).map(lambda at: 300.0 * at), st.sampled_from([0.0, 0.5, 1.0]),
)  # fmt: skip


def lists(rows: st.SearchStrategy[Any], most: int) -> st.SearchStrategy[list[Any]]:
    return st.lists(rows, max_size=most)


any_rows = st.tuples(
    lists(job_rows, 8), lists(node_rows, 6), lists(held_rows, 4), lists(told_rows, 8),
    lists(seen_rows, 12), st.sampled_from([None, {"c": 4}, {"d": 16}]),
)  # fmt: skip


def closes(rows: tuple[Any, ...]) -> None:
    """Check the account of some rows."""
    work, there, whose, told, seen, given_gpus = rows
    found = build_account(
        jobs(*work), nodes(*there), allocations=held(*whose), progress=progress(*told),
        rollups=rollups(*seen), gpus=given_gpus, since_s=SINCE, until_s=UNTIL,
    )  # fmt: skip
    cells = found.sum_cells()
    assert min(cells.values()) >= 0
    assert sum(cells.values()) == found.capacity
    assert (found.cells_by_attempt >= 0).all()
    assert found.oversubscribed >= 0
    assert 0 <= found.inferred_capacity <= found.allocated
    assert 0 <= found.assumed_uptime <= found.capacity - found.inferred_capacity
    for step in found.periods:
        assert min(step.cells.values()) >= 0
    assert sum(sum(step.cells.values()) for step in found.periods) == found.capacity


@given(any_rows)
@settings(max_examples=20, deadline=None)
def test_every_hour_is_in_one_bucket(rows: Any) -> None:
    closes(rows)


@pytest.mark.slow
@given(any_rows)
@settings(max_examples=1500, deadline=None)
def test_every_hour_is_in_one_bucket_however_odd_the_rows(rows: Any) -> None:
    closes(rows)


@given(lists(job_rows, 6), st.randoms(use_true_random=False))
@settings(max_examples=15, deadline=None)
def test_the_order_of_rows_changes_nothing(work: list[Any], shuffled: Any) -> None:
    # Rows of one key that were seen at the same time contradict each other beyond help.
    once = list({(row["cluster"], row["job"], row["attempt"] or 0): row for row in work}.values())
    there = nodes({"node": "n1"}, {"node": "n2"})
    again = list(once)
    shuffled.shuffle(again)
    first, second = (
        build_account(jobs(*rows), there, since_s=SINCE, until_s=UNTIL) for rows in (once, again)
    )
    assert first.capacity == second.capacity
    for name, amount in first.sum_buckets().items():
        # Which of equal claims gets the last tick may differ.
        assert abs(amount - second.sum_buckets()[name]) <= 1000


@given(lists(job_rows, 6), st.floats(SINCE + 1, UNTIL - 1))
@settings(max_examples=15, deadline=None)
def test_two_windows_hold_what_one_holds(work: list[Any], at: float) -> None:
    # What runs and was never seen lasts to the end of the window, which differs here.
    ended = [row for row in work if row["state"] not in ("running", "pending")]
    whole = build_account(jobs(*ended), since_s=SINCE, until_s=UNTIL).allocated
    parts = [
        build_account(jobs(*ended), since_s=since, until_s=until).allocated
        for since, until in ((SINCE, at), (at, UNTIL))
    ]
    assert (
        abs(whole - sum(parts)) <= 6 * 600 * PARTS_PER_GPU
    )  # each job may gain a rounded millisecond


def test_capacity_is_gpus_times_time_to_the_last_tick() -> None:
    rng = np.random.default_rng(5)
    there = nodes(*({"node": f"n{at}"} for at in range(40)))
    start = rng.uniform(-HOUR, 3 * DAY, 3000)
    rows = [
        {"job": str(at), "start_s": begin, "end_s": begin + length, "gpus": float(size),
         "nodes": [f"n{node}"], "state": "completed"}
        for at, (begin, length, size, node) in enumerate(
            zip(start, rng.exponential(4 * HOUR, 3000), rng.integers(1, 9, 3000),
                rng.integers(0, 40, 3000), strict=True)
        )
    ]  # fmt: skip
    found = build_account(jobs(*rows), there, since_s=0, until_s=3 * DAY)
    assert found.capacity == 40 * 8 * PARTS_PER_GPU * round(3 * DAY * 1000)
    assert sum(found.sum_cells().values()) == found.capacity
    assert found.oversubscribed > 0  # the nodes were asked for more than they have


def test_nothing_at_all_is_an_account_of_nothing() -> None:
    found = build_account(pa.table({"job": pa.array([], pa.string())}), since_s=0, until_s=DAY)
    assert found.capacity == sum(found.sum_cells().values()) == 0
