"""Who keeps the others waiting is found from what ranks said last."""

import msgspec
import pytest

pytest.importorskip("torch", reason="statuses are of journals")

from meshwright.run.parallel.health.hang_diagnosis import JobSnapshot, diagnose_hang
from meshwright.run.parallel.health.rank_health import CollectiveRecord, RankHealth


def entered(
    op: str = "all_reduce sum",
    group: str = "tp",
    number: int = 3,
    *,
    rank: int = 0,
    elements: int = 8,
    first: int = 0,
) -> CollectiveRecord:
    where = f"train.py:{rank} (step)"
    return CollectiveRecord(number, elements, True, "torch.float32", op, group, where, first)


def status(rank: int, group: str = "tp", number: int = 3, **more: object) -> RankHealth:
    """Return a rank that waits in an all-reduce, unless told otherwise."""
    at = entered(group=group, number=number, rank=rank)
    plain = RankHealth(
        rank=rank,
        host="h",
        pid=rank,
        process_start=1,
        current_collective=at,
        wait_s=2.0,
        group_ranks=(0, 1),
        collective_counts={group: number},
        current_line="data.py:7 (load)",
    )
    return msgspec.structs.replace(plain, **more)


def scene(*statuses: RankHealth, **more: frozenset[int]) -> JobSnapshot:
    return JobSnapshot({each.rank: each for each in statuses}, **more)


def test_a_rank_in_no_collective_is_named_with_its_line() -> None:
    found = diagnose_hang(scene(status(0), status(1, number=2, wait_s=None)), 0)
    assert found.culprit_ranks == (1,)
    head = found.message.partition("\n")[0]
    assert "rank 1 has not entered all_reduce sum number 3 of group tp" in head
    assert "data.py:7 (load)" in head


def test_the_path_is_followed_through_ranks_that_wait_themselves() -> None:
    waits = status(1, "pp 2>1", group_ranks=(2, 1), collective_counts={"tp": 2, "pp 2>1": 3})
    asleep = status(2, "pp 2>1", number=2, wait_s=None, group_ranks=(2, 1))
    assert diagnose_hang(scene(status(0), waits, asleep), 0).culprit_ranks == (2,)


def test_a_circle_is_a_disagreement_about_the_order() -> None:
    one = status(0, "tp", collective_counts={"tp": 3, "dp": 1})
    other = status(1, "dp", number=2, collective_counts={"tp": 2, "dp": 2})
    found = diagnose_hang(scene(one, other), 0)
    assert found.culprit_ranks == (0, 1)
    assert "wait for each other" in found.message


def test_the_same_number_of_another_operation_is_a_parting() -> None:
    at = entered(op="all_gather", rank=1)
    found = diagnose_hang(scene(status(0), status(1, current_collective=at)), 0)
    assert "ranks 0 and 1 of group tp issued different collectives" in found.message


def test_a_rank_that_came_through_what_another_died_in_is_named_with_it() -> None:
    through = status(1, number=4, recent_collectives=(entered(rank=1, elements=4096),))
    dead = status(0, group_ranks=(), wait_s=None)
    found = diagnose_hang(scene(dead, through, dead_ranks=frozenset({0})), 2)
    assert found.culprit_ranks == (0, 1)
    head = found.message.partition("\n")[0]
    assert "number 3 of group tp, 4,096 elements" in head
    assert head.endswith("rank 0 died of it")


def test_groups_of_one_name_and_other_ranks_are_not_compared() -> None:
    at = entered(op="all_gather", rank=2, first=2)
    other = status(2, current_collective=at, group_ranks=(2, 3))
    found = diagnose_hang(scene(status(0), status(1, number=2, wait_s=None), other), 0)
    assert found.culprit_ranks == (1,)


def test_the_dead_come_before_those_who_wait_for_them() -> None:
    found = diagnose_hang(scene(status(0), status(1), status(2), dead_ranks=frozenset({2})), 0)
    assert found.culprit_ranks == (2,)
    assert found.message.startswith("rank 2 died, its process is gone; it was last in all_reduce")


def test_who_raised_is_quoted() -> None:
    note = "ValueError: no such file at data.py:3"
    found = diagnose_hang(scene(status(0), status(1, state="raised", error=note)), 0)
    assert found.culprit_ranks == (1,)
    assert found.message.startswith(f"rank 1 raised {note}")


def test_a_collective_that_all_came_to_is_said_to_be_stuck() -> None:
    found = diagnose_hang(scene(status(0), status(1)), 0)
    assert "all ranks entered all_reduce sum number 3 of group tp" in found.message


def test_ranks_of_a_large_job_are_counted_not_listed() -> None:
    many = [status(rank, group_ranks=tuple(range(100))) for rank in range(100)]
    found = diagnose_hang(scene(*many), 0)
    assert "and 84 more ranks" in found.message
