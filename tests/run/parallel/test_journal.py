"""What a process did with others is written down, in order and with its line."""

import pytest

pytest.importorskip("torch", reason="journals are about tensors")

import torch

from meshwright.run.parallel.journal import BOARD_BYTES, Journal, here
from meshwright.run.parallel.status import Seen


def noted(*ops: str, elements: int = 4) -> Journal:
    journal = Journal()
    for op in ops:
        journal.note("tp", op, torch.ones(elements))
    return journal


def test_entries_are_numbered_within_their_group() -> None:
    journal = Journal()
    for group in ("tp", "dp", "tp"):
        journal.note(group, "all_gather", torch.ones(2))
    assert [(entry.group, entry.number) for entry in journal.entries] == [
        ("tp", 1),
        ("dp", 1),
        ("tp", 2),
    ]


def test_an_entry_names_the_line_that_asked_for_it() -> None:
    where = noted("all_gather").entries[0].where
    assert where is not None
    assert where.code.co_name == "noted"
    assert str(where).endswith(" (noted)")


@pytest.mark.parametrize(
    "other",
    [
        noted("all_gather", "all_reduce sum"),
        noted("all_reduce sum", "all_gather", "all_gather"),
        noted("all_reduce sum", "all_gather", elements=5),
    ],
    ids=["order", "number", "size"],
)
def test_what_differs_gives_another_digest(other: Journal) -> None:
    one = noted("all_reduce sum", "all_gather")
    assert one.digests == noted("all_reduce sum", "all_gather").digests
    assert one.digests != other.digests


def test_sizes_that_need_not_agree_leave_the_digest_alone() -> None:
    one, other = Journal(), Journal()
    one.note("ep", "all_to_all", torch.ones(3), same_size=False)
    other.note("ep", "all_to_all", torch.ones(7), same_size=False)
    assert one.digests == other.digests


def test_only_the_last_entries_are_kept() -> None:
    journal = Journal(keep=2)
    for _ in range(5):
        journal.note("tp", "all_gather", torch.ones(1))
    assert [entry.number for entry in journal.entries] == [4, 5]
    assert journal.counts == {"tp": 5}


def test_the_board_says_what_was_issued_or_is_waited_for() -> None:
    journal = Journal()
    journal.board = memoryview(bytearray(BOARD_BYTES))
    first = journal.note("tp", "all_reduce sum", torch.ones(1 << 10, dtype=torch.bfloat16))
    second = journal.note("dp", "all_gather", torch.ones(3))
    assert Seen.on(bytes(journal.board)) == Seen.of(second)
    journal.enter(first)
    assert Seen.on(bytes(journal.board)) == Seen.of(first)
    assert journal.waits is not None
    journal.leave(first, 0)
    assert journal.waits is None


def test_an_empty_or_torn_board_says_nothing() -> None:
    assert Seen.on(bytes(BOARD_BYTES)) is None
    assert Seen.on(b"12\t4") is None


def test_the_nearest_line_is_the_caller() -> None:
    where = here()
    assert where is not None
    assert where.code.co_name == "test_the_nearest_line_is_the_caller"
