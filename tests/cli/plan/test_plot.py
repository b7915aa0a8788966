"""Pictures of `mw plan`: written in three formats, by themselves, the same each time."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from meshwright.cli import main
from meshwright.cli.render.html import render_chart_page
from meshwright.cli.result import NoteView, make_fields, make_table

pytest.importorskip("matplotlib")

Captured = pytest.CaptureFixture[str]

NARROW = [
    "llama3.1-8b", "--cluster", "dgx-h100", "--sequence-length", "8192", "--global-batch", "64",
    "--tp", "2", "--fix", "cp=1", "--pp", "1", "--fix", "microbatch=1,2",
]  # fmt: skip
ASKED = {
    "plans": ["--gpus", "8"],
    "scaling": ["--sweep", "gpus=8..16"],
    "batch": ["--gpus", "8", "--sweep", "batch=32,64"],
    "front": ["--gpus", "8,16", "--tokens", "1T", "--front"],
}


def drawn(words: list[str], path: Path, capsys: Captured) -> bytes:
    assert main(["plan", *NARROW, *words, "--plot", str(path)]) == 0
    assert f"wrote {path}" in capsys.readouterr().err
    return path.read_bytes()


@pytest.mark.parametrize("asked", ASKED)
def test_a_png_is_a_png(asked: str, tmp_path: Path, capsys: Captured) -> None:
    data = drawn(ASKED[asked], tmp_path / "plot.png", capsys)
    assert data.startswith(b"\x89PNG\r\n")
    assert len(data) > 10_000


@pytest.mark.parametrize("asked", ASKED)
def test_an_svg_is_the_same_each_time(asked: str, tmp_path: Path, capsys: Captured) -> None:
    one = drawn(ASKED[asked], tmp_path / "one.svg", capsys)
    other = drawn(ASKED[asked], tmp_path / "other.svg", capsys)
    assert one == other
    assert ET.fromstring(one).tag.endswith("svg")


def test_a_page_holds_picture_and_table_and_needs_no_network(
    tmp_path: Path, capsys: Captured
) -> None:
    text = drawn(ASKED["scaling"], tmp_path / "plot.html", capsys).decode()
    assert text.count("<svg") == 1
    assert "<td" in text
    assert "tok/s" in text
    assert "<?xml" not in text
    assert not re.search(r'(?:src|href)="(?!#)', text)
    assert not re.search(r"<script|<link|@import|url\((?!#)", text)


def test_a_page_escapes_what_it_shows() -> None:
    views = (make_fields({"a<b": "c&d"}, "t<"), make_table("x<y", [("1<2",)]), NoteView("<note>"))
    text = render_chart_page("<title>", "<?xml?><svg></svg>", views)
    for said in ("a&lt;b", "c&amp;d", "x&lt;y", "1&lt;2", "&lt;note&gt;", "&lt;title&gt;"):
        assert said in text
    assert "<note>" not in text


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("plot.gif", "is no picture that can be written"),
        ("file/plot.png", "is a file, not a folder"),
    ],
)
def test_a_picture_that_cannot_be_written_is_named_before_the_search(
    name: str, fault: str, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "file").touch()
    words = ["plan", "llama3.1-405b", "--cluster", "h100-superpod", "--gpus", "16384"]
    assert main([*words, "--plot", str(tmp_path / name)]) == 2
    assert fault in capsys.readouterr().err


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["plan", *NARROW, "--gpus", "8", "--plot", str(tmp_path / "plot.png")]) == 3
    assert "pip install 'meshwright[plots]'" in capsys.readouterr().err


def test_without_ray_the_extra_is_named(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["plan", *NARROW, "--gpus", "8", "--ray"]) == 3
    assert "pip install 'meshwright[ray]'" in capsys.readouterr().err
