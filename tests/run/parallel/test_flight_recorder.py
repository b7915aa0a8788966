"""What a process did with others is written down, in order and with its line."""

import pytest

pytest.importorskip("torch", reason="journals are about tensors")

import torch

from meshwright.run.parallel.flight_recorder import (
    SHARED_PAGE_BYTES,
    FlightRecorder,
    find_call_site,
)
from meshwright.run.parallel.health.rank_health import CollectiveRecord


def noted(*ops: str, elements: int = 4) -> FlightRecorder:
    journal = FlightRecorder()
    for op in ops:
        journal.record("tp", op, torch.ones(elements))
    return journal


def test_entries_are_numbered_within_their_group() -> None:
    journal = FlightRecorder()
    for group in ("tp", "dp", "tp"):
        journal.record(group, "all_gather", torch.ones(2))
    assert [(entry.group, entry.sequence_number) for entry in journal.records] == [
        ("tp", 1),
        ("dp", 1),
        ("tp", 2),
    ]


def test_an_entry_names_the_line_that_asked_for_it() -> None:
    where = noted("all_gather").records[0].call_site
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
def test_what_differs_gives_another_digest(other: FlightRecorder) -> None:
    one = noted("all_reduce sum", "all_gather")
    assert one.checksums == noted("all_reduce sum", "all_gather").checksums
    assert one.checksums != other.checksums


def test_sizes_that_need_not_agree_leave_the_digest_alone() -> None:
    one, other = FlightRecorder(), FlightRecorder()
    one.record("ep", "all_to_all", torch.ones(3), same_size=False)
    other.record("ep", "all_to_all", torch.ones(7), same_size=False)
    assert one.checksums == other.checksums


def test_only_the_last_entries_are_kept() -> None:
    journal = FlightRecorder(keep=2)
    for _ in range(5):
        journal.record("tp", "all_gather", torch.ones(1))
    assert [entry.sequence_number for entry in journal.records] == [4, 5]
    assert journal.counts == {"tp": 5}


def test_the_board_says_what_was_issued_or_is_waited_for() -> None:
    journal = FlightRecorder()
    journal.shared_page = memoryview(bytearray(SHARED_PAGE_BYTES))
    first = journal.record("tp", "all_reduce sum", torch.ones(1 << 10, dtype=torch.bfloat16))
    second = journal.record("dp", "all_gather", torch.ones(3))
    assert CollectiveRecord.parse_shared_page(
        bytes(journal.shared_page)
    ) == CollectiveRecord.from_record(second)
    journal.begin_wait(first)
    assert CollectiveRecord.parse_shared_page(
        bytes(journal.shared_page)
    ) == CollectiveRecord.from_record(first)
    assert journal.blocked_call is not None
    journal.end_wait(first, 0)
    assert journal.blocked_call is None


def test_an_empty_or_torn_board_says_nothing() -> None:
    assert CollectiveRecord.parse_shared_page(bytes(SHARED_PAGE_BYTES)) is None
    assert CollectiveRecord.parse_shared_page(b"12\t4") is None


def test_the_nearest_line_is_the_caller() -> None:
    where = find_call_site()
    assert where is not None
    assert where.code.co_name == "test_the_nearest_line_is_the_caller"
