"""Drawings show who runs what when, with every pass one slot long."""

from inspect import cleandoc

from hypothesis import given

from meshwright.policy.pipeline import (
    PipelineSchedule,
    add_transfers,
    build_schedule,
    format_schedule,
)
from tests.policy.pipeline.reference import schedules


def test_1f1b() -> None:
    assert format_schedule(build_schedule("1f1b", 3, 4)) == cleandoc(
        """
        rank 0  F0 F1 F2 .. .. .. .. B0--- F3 B1--- .. B2--- .. B3---
        rank 1  .. F0 F1 .. .. B0--- F2 B1--- F3 B2--- .. B3--- .. ..
        rank 2  .. .. F0 B0--- F1 B1--- F2 B2--- F3 B3--- .. .. .. ..
        """
    )


def test_small_letters_mark_the_second_chunk() -> None:
    assert format_schedule(build_schedule("zb-v", 2, 3)) == cleandoc(
        """
        rank 0  F0 F1 F2 f0 i0 w0 f1 i1 w1 I0 W0 f2 i2 w2 I1 W1 I2 W2 ..
        rank 1  .. F0 f0 F1 f1 i0 w0 F2 I0 W0 f2 i1 w1 I1 i2 I2 W1 w2 W2
        """
    )


def test_overlapped_passes_share_a_block() -> None:
    assert "F3&b5---" in format_schedule(build_schedule("dualpipe", 4, 8))


def test_more_chunks_are_counted_with_letters() -> None:
    assert "F0a F1a F0b F1b F0c" in format_schedule(
        build_schedule("interleaved", 2, 2, virtual_stages=3)
    )


@given(schedules())
def test_every_line_has_the_same_slots(schedule: PipelineSchedule) -> None:
    lines = format_schedule(schedule).splitlines()
    assert len(lines) == schedule.ranks
    assert len({len(line) for line in lines}) == 1


def test_transfers_are_not_drawn() -> None:
    schedule = build_schedule("zb-h1", 3, 5)
    assert format_schedule(add_transfers(schedule)) == format_schedule(schedule)
