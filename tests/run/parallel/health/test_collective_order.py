"""Ranks that issue other collectives than their partners are told so within a step."""

import pytest

pytest.importorskip("torch", reason="runs gloo ranks")

import numpy as np

from meshwright.run.parallel.health.collective_order import (
    describe_divergence,
    find_inconsistent_groups,
    is_order_consistent,
)
from meshwright.run.parallel.health.rank_health import CollectiveRecord
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from tests.run.parallel.mishaps import stray


def seen(number: int, op: str) -> CollectiveRecord:
    return CollectiveRecord(number, 8, True, "torch.float32", op, "tp", f"train.py:{number} (step)")


@pytest.mark.parametrize(
    ("mishap", "said"),
    [
        (
            "another op",
            [
                "ranks 0 and 2 of group dp issued different collectives",
                "they part at number 2",
                "rank 0 all_reduce sum number 2 of group dp, 3 elements of float32, at ",
                "rank 2 all_gather number 2 of group dp, 3 elements of float32, at ",
                "mishaps.py:",
            ],
        ),
        (
            "one too many",
            [
                "ranks 2 and 3 of group tp issued different collectives",
                "rank 2 all_reduce sum number 3 of group tp",
                "rank 3 has issued no such one",
            ],
        ),
        (
            "a lone message",
            ["rank 2 has used pp 0>2, but its partner never did: message number 1 of group pp 0>2"],
        ),
    ],
)
def test_every_rank_names_the_two_and_where_they_parted(mishap: str, said: list[str]) -> None:
    found = spawn_ranks(4, stray, mishap)
    assert [each[0] for each in found] == [""] * 4, "before it happens"
    error = found[0][1]
    assert [each[1] for each in found] == [error] * 4, "all ranks say the same"
    assert all(words in error for words in said), error


def test_ranks_in_order_hear_nothing() -> None:
    assert spawn_ranks(4, stray, "nothing") == [[""] * 3] * 4


FINE = [[7, 2, 3, 99], [7, 2, 3, 99], [8, 2, 5, 11], [8, 2, 5, 11]]


def table_of(rows: list[list[int]]) -> np.ndarray:
    """Return a table in which each rank says something of one group and has room for another."""
    return np.array([[row, [0] * 4] for row in rows])


def test_groups_of_other_ranks_may_do_other_things() -> None:
    table = table_of(FINE)
    assert is_order_consistent(table)
    assert list(find_inconsistent_groups(table.tolist())) == []


@pytest.mark.parametrize(
    ("row", "pair"),
    [([7, 2, 4, 99], (7, 0, 1)), ([7, 2, 3, 98], (7, 0, 1)), ([0, 0, 0, 0], (7, 0, 0))],
    ids=["count", "digest", "absent"],
)
def test_a_member_that_says_something_else_is_found(
    row: list[int], pair: tuple[int, int, int]
) -> None:
    table = table_of([FINE[0], row, *FINE[2:]])
    assert not is_order_consistent(table)
    assert next(find_inconsistent_groups(table.tolist())) == pair


def test_entries_that_only_one_rank_still_keeps_do_not_count() -> None:
    ones = [seen(number, "all_gather") for number in (1, 2, 3, 4)]
    others = [seen(3, "all_gather"), seen(4, "all_reduce sum")]
    assert "they part at number 4" in describe_divergence(0, ones, 1, others, "tp")


def test_a_parting_that_both_have_forgotten_is_said_to_be_so() -> None:
    same = [seen(8, "all_gather")]
    assert "no longer in their journals" in describe_divergence(0, same, 1, same, "tp")
