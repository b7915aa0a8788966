"""How far a run is, for a person or a log."""

import io
import re

import pytest
from rich.console import Console

from meshwright.run.train.logging import LoggingConfig
from meshwright.run.train.logging.progress import (
    ProgressBar,
    ProgressPrinter,
    format_progress,
    open_progress,
)

FIGURES = {
    "loss": 3.21449,
    "tokens_per_s": 61_900.0,
    "mfu": 0.5141,
    "max_memory_allocated_bytes": 74 * 2**30,
    "data_wait_fraction": 0.0012,
    "lr": 1e-4,
}
SHOWN = "loss 3.2145  61.9k tokens/s  MFU 51.4%  memory 74 GiB  data wait 0.1%"
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9]")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_line_shows_what_is_known() -> None:
    assert format_progress(FIGURES) == SHOWN
    assert format_progress({"mfu": 0.5}) == "MFU 50.0%"
    several = {"reward_right_mean": 0.5, "entropy": 1.0, "reward_mean": 0.75}
    assert format_progress(several) == "reward 0.750  right 0.500  entropy 1.000"
    assert format_progress({"eval/loss": 1.0}) == ""


def test_lines_come_now_and_then_and_at_the_end() -> None:
    stream, clock = io.StringIO(), Clock()
    lines = ProgressPrinter(1000, 100, stream, every_s=10, clock=clock)
    for step in range(101, 126):
        clock.now_s += 1
        lines.write(step, {"loss": 2.0})
    lines.write(126, {"eval/loss": 3.0})  # nothing of it is shown
    lines.close()
    assert stream.getvalue().splitlines() == [
        "step 101 of 1,000  loss 2.0000  15 min left",
        "step 111 of 1,000  loss 2.0000  14.8 min left",
        "step 121 of 1,000  loss 2.0000  14.7 min left",
        "step 125 of 1,000  loss 2.0000  14.6 min left",
    ]


def test_the_last_step_is_always_a_line_and_only_one() -> None:
    stream = io.StringIO()
    lines = ProgressPrinter(3, 0, stream, every_s=1e9, clock=Clock())
    for step in (1, 2, 3):
        lines.write(step, {"loss": 1.0})
    lines.close()
    assert stream.getvalue().splitlines() == [
        "step 1 of 3  loss 1.0000",
        "step 3 of 3  loss 1.0000",
    ]


def test_a_run_without_an_end_has_no_time_left() -> None:
    stream, clock = io.StringIO(), Clock()
    lines = ProgressPrinter(None, 0, stream, clock=clock)
    clock.now_s = 5
    lines.write(1, {"loss": 1.0})
    assert stream.getvalue() == "step 1  loss 1.0000\n"


def _drawn() -> str:
    console = Console(file=Terminal(), force_terminal=True, width=140)
    bar = ProgressBar(200, 50, console)
    bar.write(100, FIGURES)
    bar.close()
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_a_bar_shows_the_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    drawn = _drawn()
    assert SHOWN in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", drawn)
    assert COLOUR.search(drawn)


def test_a_bar_has_no_colour_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    assert COLOUR.search(_drawn()) is None


def test_the_stream_decides_between_a_bar_and_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MESHWRIGHT_NO_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def opened(progress: str, stream: io.StringIO) -> str:
        settings = LoggingConfig(progress=progress)  # type: ignore[arg-type]
        output = open_progress(settings, 10, 0, stream)
        if output is not None:
            output.close()
        return type(output).__name__

    assert opened("auto", Terminal()) == "ProgressBar"
    assert opened("auto", io.StringIO()) == "ProgressPrinter"
    assert opened("lines", Terminal()) == "ProgressPrinter"
    assert opened("bar", io.StringIO()) == "ProgressBar"
    assert opened("none", Terminal()) == "NoneType"
    monkeypatch.setenv("TERM", "dumb")
    assert opened("auto", Terminal()) == "ProgressPrinter"
    monkeypatch.setenv("MESHWRIGHT_NO_PROGRESS", "1")
    assert opened("auto", io.StringIO()) == "NoneType"
