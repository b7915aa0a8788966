"""Tables in narrow terminals: every number stays whole."""

import re

import pytest

from meshwright.cli.render.column_widths import GAP, fit_columns, scale_bars
from meshwright.cli.render.terminal import print_result
from meshwright.cli.result import CommandResult, TableView, make_table

ROWS = (
    (
        "0",
        "█" * 29 + "▒" * 8 + "·" * 3,
        "137.5",
        "71.5 %",
        "ncclDevKernel_AllGather_RING_LL",
        "a b",
    ),
    ("17", "█" * 40, "1,128.9", "100.0 %", "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NNT", "c " * 60),
)


def wide_table() -> TableView:
    return make_table(
        "rank, where it goes, window ms, of busy time, kernel, remedy",
        ROWS,
        right="rank, window ms, of busy time",
        bars="where it goes",
        wide="remedy",
    )


def total(widths: tuple[int, ...]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


@pytest.mark.parametrize("room", [80, 100, 120])
def test_a_table_fits_the_terminal_and_its_numbers_stay_whole(room: int) -> None:
    view = wide_table()
    widths = fit_columns(view, room)
    assert total(widths) <= room
    for at, column in enumerate(view.columns):
        if column in view.right_aligned:
            assert widths[at] >= max(len(row[at]) for row in view.rows)


def test_with_room_enough_every_column_is_as_wide_as_what_stands_in_it() -> None:
    view = wide_table()
    natural = fit_columns(view, 1000)
    assert natural == (4, 40, 9, 12, 41, 120)
    assert fit_columns(view, total(natural)) == natural


def test_prose_gives_way_before_names() -> None:
    view = make_table("name, why", [("n" * 30, "w" * 90)], wide="why")
    assert fit_columns(view, 80) == (30, 48)


def test_a_bar_keeps_its_proportions_when_drawn_shorter() -> None:
    bars = ["█" * 20 + "▒" * 10 + "·" * 10, "█" * 40]
    assert scale_bars(bars, 20) == ["█" * 10 + "▒" * 5 + "·" * 5, "█" * 20]
    assert scale_bars(bars, 40) == bars


def test_what_is_written_after_a_bar_is_kept() -> None:
    assert scale_bars(["████████|1.2×", "no device work"], 9) == ["████|1.2×", "no device work"]


@pytest.mark.parametrize("room", [40, 80, 120])
def test_no_digit_is_lost_on_a_terminal(
    room: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(room))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    print_result(CommandResult("test/1", {}, (wide_table(),)), "auto")
    drawn = capsys.readouterr().out
    assert all(re.search(rf"(?<!\S){re.escape(row[2])}(?!\S)", drawn) for row in ROWS)
    assert all(row[3] in drawn for row in ROWS)
