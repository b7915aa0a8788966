"""A line of progress: shown to a person, silent in pipes and where asked to be."""

import io

import pytest

from meshwright.cli.render.progress import ProgressLine


class Terminal(io.StringIO):
    """A stderr that a person watches."""

    def isatty(self) -> bool:
        return True


def test_each_text_takes_the_place_of_the_one_before_and_the_end_clears_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MESHWRIGHT_NO_PROGRESS", raising=False)
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with ProgressLine() as line:
        line.show("1 of 2")
        line.show("2 of 2")
    assert terminal.getvalue() == "\r\x1b[K1 of 2\r\x1b[K2 of 2\r\x1b[K"


@pytest.mark.parametrize(
    ("stderr", "quiet", "variable"),
    [(io.StringIO(), False, ""), (Terminal(), True, ""), (Terminal(), False, "1")],
)
def test_nothing_is_shown_where_nobody_watches(
    monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, quiet: bool, variable: str
) -> None:
    monkeypatch.setenv("MESHWRIGHT_NO_PROGRESS", variable)
    monkeypatch.setattr("sys.stderr", stderr)
    with ProgressLine(quiet=quiet) as line:
        line.show("1 of 2")
    assert stderr.getvalue() == ""
