"""Who keeps the others waiting is found from what ranks said last."""

import msgspec
import pytest

pytest.importorskip("torch", reason="statuses are of journals")

from meshwright.run.parallel.status import Seen, Status
from meshwright.run.parallel.verdict import Scene, judge


def entered(
    op: str = "all_reduce sum",
    group: str = "tp",
    number: int = 3,
    *,
    rank: int = 0,
    elements: int = 8,
    first: int = 0,
) -> Seen:
    where = f"train.py:{rank} (step)"
    return Seen(number, elements, True, "torch.float32", op, group, where, first)


def status(rank: int, group: str = "tp", number: int = 3, **more: object) -> Status:
    """Return a rank that waits in an all-reduce, unless told otherwise."""
    at = entered(group=group, number=number, rank=rank)
    plain = Status(
        rank=rank,
        host="h",
        pid=rank,
        born=1,
        at=at,
        waits_s=2.0,
        members=(0, 1),
        counts={group: number},
        doing="data.py:7 (load)",
    )
    return msgspec.structs.replace(plain, **more)


def scene(*statuses: Status, **more: frozenset[int]) -> Scene:
    return Scene({each.rank: each for each in statuses}, **more)


def test_a_rank_in_no_collective_is_named_with_its_line() -> None:
    found = judge(scene(status(0), status(1, number=2, waits_s=None)), 0)
    assert found.culprits == (1,)
    head = found.text.partition("\n")[0]
    assert "rank 1 did not come to all_reduce sum number 3 of group tp" in head
    assert "data.py:7 (load)" in head


def test_the_path_is_followed_through_ranks_that_wait_themselves() -> None:
    waits = status(1, "pp 2>1", members=(2, 1), counts={"tp": 2, "pp 2>1": 3})
    asleep = status(2, "pp 2>1", number=2, waits_s=None, members=(2, 1))
    assert judge(scene(status(0), waits, asleep), 0).culprits == (2,)


def test_a_circle_is_a_disagreement_about_the_order() -> None:
    one = status(0, "tp", counts={"tp": 3, "dp": 1})
    other = status(1, "dp", number=2, counts={"tp": 2, "dp": 2})
    found = judge(scene(one, other), 0)
    assert found.culprits == (0, 1)
    assert "wait for each other" in found.text


def test_the_same_number_of_another_operation_is_a_parting() -> None:
    at = entered(op="all_gather", rank=1)
    found = judge(scene(status(0), status(1, at=at)), 0)
    assert "ranks 0 and 1 of group tp do different things" in found.text


def test_a_rank_that_came_through_what_another_died_in_is_named_with_it() -> None:
    through = status(1, number=4, lately=(entered(rank=1, elements=4096),))
    dead = status(0, members=(), waits_s=None)
    found = judge(scene(dead, through, dead=frozenset({0})), 2)
    assert found.culprits == (0, 1)
    head = found.text.partition("\n")[0]
    assert "number 3 of group tp, 4,096 elements" in head
    assert head.endswith("rank 0 died of it")


def test_groups_of_one_name_and_other_ranks_are_not_compared() -> None:
    at = entered(op="all_gather", rank=2, first=2)
    other = status(2, at=at, members=(2, 3))
    found = judge(scene(status(0), status(1, number=2, waits_s=None), other), 0)
    assert found.culprits == (1,)


def test_the_dead_come_before_those_who_wait_for_them() -> None:
    found = judge(scene(status(0), status(1), status(2), dead=frozenset({2})), 0)
    assert found.culprits == (2,)
    assert found.text.startswith("rank 2 died, its process is gone; it was last in all_reduce")


def test_who_raised_is_quoted() -> None:
    note = "ValueError: no such file at data.py:3"
    found = judge(scene(status(0), status(1, state="raised", note=note)), 0)
    assert found.culprits == (1,)
    assert found.text.startswith(f"rank 1 raised {note}")


def test_a_collective_that_all_came_to_is_said_to_be_stuck() -> None:
    found = judge(scene(status(0), status(1)), 0)
    assert "all ranks came to all_reduce sum number 3 of group tp" in found.text


def test_ranks_of_a_large_job_are_counted_not_listed() -> None:
    many = [status(rank, members=tuple(range(100))) for rank in range(100)]
    found = judge(scene(*many), 0)
    assert "and 84 more ranks" in found.text
