"""Changing one field of a layout brings along the fields that hang on it."""

import pytest

from meshwright.errors import InputError
from meshwright.spec.layout import Layout
from meshwright.spec.layout.layout_changes import change_degrees, change_layout, list_changed_fields

BASE = Layout(tp=4, sequence_parallel=True, pp=4, dp=8)


def test_sequence_parallelism_goes_with_its_group() -> None:
    changed = change_degrees(BASE, 80, BASE.gpus, tp=1)
    assert list_changed_fields(BASE, changed) == {"tp": 1, "sequence_parallel": False, "dp": 32}


def test_other_degrees_leave_the_number_of_gpus_alone() -> None:
    assert change_degrees(BASE, 80, BASE.gpus, pp=8, tp=2).gpus == BASE.gpus


def test_degrees_that_do_not_divide_the_gpus_are_refused() -> None:
    with pytest.raises(InputError, match="no multiple of tp × cp × pp = 12"):
        change_degrees(BASE, 80, BASE.gpus, tp=3)


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("interleaved", 2), ("zb-v", 2), ("dualpipe-v", 2), ("zb-h1", 1)]
)
def test_a_schedule_brings_the_chunks_it_needs(schedule: str, chunks: int) -> None:
    assert change_layout(BASE, 80, schedule=schedule).virtual_stages == chunks


def test_chunks_bring_a_schedule_that_runs_them() -> None:
    assert change_layout(BASE, 80, virtual_stages=4).schedule == "interleaved"
    chunked = change_layout(BASE, 80, virtual_stages=4)
    assert change_layout(chunked, 80, virtual_stages=1).schedule == "1f1b"


def test_without_a_pipeline_there_is_no_schedule() -> None:
    chunked = change_layout(BASE, 80, virtual_stages=4)
    alone = change_degrees(chunked, 80, chunked.gpus, pp=1)
    assert (alone.schedule, alone.virtual_stages) == ("1f1b", 1)


def test_layers_that_do_not_divide_leave_the_ends_short() -> None:
    split = change_layout(BASE, 126, pp=16, dp=2).stage_layers
    assert split == (7, *[8] * 14, 7)


def test_a_given_split_stays_while_the_chunks_do() -> None:
    given = Layout(pp=4, stage_layers=(19, 20, 20, 21))
    assert change_layout(given, 80, microbatch=2).stage_layers == (19, 20, 20, 21)
    assert change_layout(given, 80, pp=2).stage_layers == (40, 40)


def test_layers_that_divide_need_no_list() -> None:
    assert change_layout(BASE, 80, pp=8).stage_layers is None
