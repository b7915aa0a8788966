"""The tables of what overlap is worth: every case can run, and overlap never costs time."""

import pytest

from meshwright.spec.layout import Layout
from scripts.overlap_table import CASES, Case, even, markdown, row_of

SIZES = [64, 256, 1024, 4096, 16384]
EVERY = [case for cases in CASES.values() for case in cases]


def test_every_table_has_every_size() -> None:
    assert [[case.gpus for case in cases] for cases in CASES.values()] == [SIZES] * len(CASES)


@pytest.mark.parametrize("case", EVERY, ids=lambda case: f"{case.model} on {case.gpus}")
def test_a_case_runs_on_its_gpus_and_is_fastest_with_everything_overlapped(case: Case) -> None:
    row = row_of(case)
    assert row.work.layout.gpus == case.gpus
    assert {"gradients", "parameters"} <= row.without_s.keys()
    assert row.all_s <= min(row.without_s.values())
    assert max(row.without_s.values()) <= row.none_s


def test_every_kind_is_worth_something_somewhere() -> None:
    rows = [row_of(case) for case in EVERY]
    kinds = {
        name.removeprefix("overlap_") for name in Layout.__struct_fields__ if "overlap" in name
    }
    for kind in kinds:
        assert any(row.without_s.get(kind, 0) > 1.005 * row.all_s for row in rows), kind


def test_a_row_says_how_much_longer_a_step_takes() -> None:
    text = markdown()
    row = row_of(EVERY[0])
    assert f"| {row.without_s['tp'] / row.all_s - 1:+.1%}".replace("%", " %") in text
    assert text.count("\n| ") == len(EVERY) + 2 * len(CASES)


def test_layers_are_cut_with_smaller_ends() -> None:
    assert even(80, 20) == (4,) * 20
    assert even(7, 4) == (1, 2, 2, 2)
    assert even(61, 16) == (3, 3, *(4,) * 13, 3)
