"""Names in foreign files reach a terminal as text, whatever characters they hold."""

import json
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.cli.render.safe_text import escape_json, escape_view
from meshwright.cli.result import BarView, FieldsView, NoteView, TableView, TextView, View
from meshwright.control_characters import escape_control_characters, has_control_characters
from meshwright.timeline import write_timeline
from tests.observe.analyze.traces import call, host, kernel, step, timeline
from tests.timeline.readers.small_dumps import dump, entry, event, snapshot

Captured = pytest.CaptureFixture[str]
SOURCE = Path(escape_view.__code__.co_filename).parents[2]

CONTROLS = [
    "\x1b[31mred",
    "\x1b]0;title\x07",
    "\x1b]52;c;ZXZpbA==\x07",
    "\x1b[2J\x1b[H",
    "\x1bP+q\x1b\\",
    "\x9b31m",
    "\x9d0;title\x9c",
    "\x90q\x9c",
    "\x07",
    "\x08\x08\x08ok",
    "\rok",
    "\x0b",
    "\x0c",
    "\x00",
    "\x7f",
    "\x85",
    "\u202egpj.exe",
    "\u2066\u2069",
    "\u200f",
    "\u061c",
    "\u2028",
    "\u2029",
    "\ufeff",
    "\udc9b",
]
RAW = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2028\u2029\u2066-\u2069\ufeff"
    "\ud800-\udfff]"
)


@pytest.mark.parametrize("text", CONTROLS)
def test_a_control_character_is_written_out(text: str) -> None:
    shown = escape_control_characters(f"a{text}b")
    assert shown.isprintable()
    assert shown.startswith("a\\")
    assert shown.endswith("b")
    assert has_control_characters(text)


@pytest.mark.parametrize(
    "text", ["", "a b", "ümläut", "日本語", "🙂👩‍💻", "עברית", "e\u0301", "█▓▒", "\\x1b", "→ …"]
)
def test_text_of_people_stays_as_it_is(text: str) -> None:
    assert escape_control_characters(text) == text
    assert not has_control_characters(text)


def test_lines_and_tabs_are_kept_where_they_are_asked_for() -> None:
    assert escape_control_characters("a\n\tb\x1b", keep_lines=True) == "a\n\tb\\x1b"
    assert escape_control_characters("a\n\tb") == "a\\x0a\\x09b"


@pytest.mark.parametrize("text", CONTROLS)
@pytest.mark.parametrize("is_terminal", [False, True])
def test_every_part_of_every_view_is_escaped(text: str, is_terminal: bool) -> None:
    views: list[View] = [
        NoteView(text),
        TextView(text),
        BarView(text, text),
        FieldsView(((text, text),), text),
        TableView((text,), ((text,),), text, frozenset([text]), frozenset([text])),
    ]
    for view in views:
        assert not RAW.search("".join(_strings(escape_view(view, is_terminal=is_terminal))))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple | frozenset):
        for item in value:
            yield from _strings(item)


def test_text_that_programs_read_on_is_changed_on_a_terminal_only() -> None:
    view = TextView("\x1b[0m", verbatim=True)
    assert escape_view(view, is_terminal=False) == view
    assert escape_view(view, is_terminal=True) == TextView("\\x1b[0m")


def test_a_name_with_a_tab_stays_in_its_column_of_a_pipe() -> None:
    shown = escape_view(TableView(("a", "b"), (("x\ty\nz", "1"),)), is_terminal=False)
    assert isinstance(shown, TableView)
    assert shown.rows == (("x\\x09y\\x0az", "1"),)


@pytest.mark.parametrize("text", CONTROLS)
def test_json_says_the_same_without_control_characters(text: str) -> None:
    raw = json.dumps({text: [text]}, ensure_ascii=False, indent=2)
    shown = escape_json(raw)
    assert json.loads(shown) == {text: [text]}
    assert not RAW.search(shown)


HOSTILE = "n\x1b]0;owned\x07\x9b31m\u202e\x7f"


def _trace(folder: Path) -> list[str]:
    rows = [
        step(1, 0, 900_000),
        host(0, 30_000, f"aten::{HOSTILE}"),
        call(10_000, 20_000, flow_out=1),
        kernel(100_000, 300_000, HOSTILE, flow_in=1),
        call(310_000, 320_000, HOSTILE, flow_out=2),
        kernel(330_000, 390_000, f"{HOSTILE}2", flow_in=2, lane=HOSTILE),
    ]
    metadata = {"devices": json.dumps([{"name": f"GPU {HOSTILE}"}])}
    write_timeline(timeline(*rows, metadata=metadata), folder / "trace")
    return [str(folder / "trace")]


def _kineto(folder: Path) -> list[str]:
    fields = {"ph": "X", "pid": 0, "tid": 7, "ts": 1, "dur": 50}
    events = [
        {**fields, "cat": "kernel", "name": HOSTILE, "args": {"stream": 7, HOSTILE: HOSTILE}},
        {**fields, "cat": HOSTILE, "name": HOSTILE, "tid": HOSTILE},
    ]
    path = folder / "trace.json"
    path.write_text(json.dumps({"deviceProperties": [{"id": 0, "name": HOSTILE}],
                                "schemaVersion": 1, "traceEvents": events}))  # fmt: skip
    return [str(path)]


def _dumps(folder: Path) -> list[str]:
    frames = [{"name": HOSTILE, "filename": f"/jobs/{HOSTILE}.py", "line": 12}]
    for rank in range(4):
        entries = [] if rank == 2 else [
            entry(7, frames=frames, process_group=("0", HOSTILE), profiling_name=f"nccl:{HOSTILE}")
        ]  # fmt: skip
        (folder / f"_dump_{rank}").write_bytes(pickle.dumps(dump(entries)))
    return [str(folder)]


def _snapshot(folder: Path) -> list[str]:
    frames = [{"name": HOSTILE, "filename": f"/jobs/{HOSTILE}.py", "line": 12}]
    events = [event("alloc", 0, 1024, frames=frames)]
    path = folder / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot(events, active=1024)))
    return [str(path)]


def _nccl_log(folder: Path) -> list[str]:
    path = folder / "job.log"
    path.write_text(
        f"node1:12:34 [0] NCCL INFO Bootstrap : Using {HOSTILE}\n"
        f"node1:12:34 [0] NCCL INFO comm 0x7f rank 0 nranks 2 cudaDev 0 busId b000 - Init START\n"
        f"node1:12:34 [0] NCCL WARN {HOSTILE} failed\n"
    )
    return [str(path)]


def _jobs(folder: Path) -> list[str]:
    head = "cluster,job,attempt,name,user,team,gpu_kind,state,submit_s,start_s,end_s,gpus"
    lines = [
        f"c,{at},0,{HOSTILE},{HOSTILE}{at % 3},{HOSTILE},{HOSTILE},completed,{at * 9},{at * 9},"
        f"{at * 9 + 600},{1 + at % 2}"
        for at in range(20)
    ]  # fmt: skip
    path = folder / "jobs.csv"
    path.write_text("\n".join([head, *lines]) + "\n")
    return [str(path)]


def _model(folder: Path) -> list[str]:
    path = folder / f"{HOSTILE}.toml"
    path.write_text(f'name = {json.dumps(HOSTILE)}\n{json.dumps(HOSTILE)} = 1\n"a\\u202E" = 2\n')
    return [str(path)]


def _metrics(folder: Path) -> list[str]:
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, HOSTILE: 2}) + "\n")
    (folder / "config.toml").write_text(f"{json.dumps(HOSTILE)} = 1\n")
    return [str(folder)]


def _bench(folder: Path) -> list[str]:
    path = folder / "rows.jsonl"
    path.write_text(json.dumps({"format": HOSTILE, "name": HOSTILE}) + "\n")
    return [str(path)]


WAYS: dict[str, tuple[Callable[[Path], list[str]], list[list[str]]]] = {
    "analyze": (_trace, [["analyze"], ["analyze", "--by-region"], ["analyze", "--full"]]),
    "analyze a foreign trace": (_kineto, [["analyze"]]),
    "analyze a log": (_nccl_log, [["analyze"]]),
    "roofline": (_trace, [["roofline"], ["roofline", "--gpu", "h100-80g-sxm"]]),
    "timeline": (_trace, [["timeline", "show"], ["timeline", "repair"]]),
    "hang": (_dumps, [["hang"]]),
    "memory": (_snapshot, [["memory"]]),
    "queue": (_jobs, [["queue", "simulate", "--gpus", "16"]]),
    "models": (_model, [["models", "show"], ["models"], ["simulate"], ["layout", "check"],
                        ["layout", "import"], ["whatif"], ["plan"], ["train"], ["clusters"]]),
    "run folders": (_metrics, [["train"], ["twin"], ["timeline", "show"], ["convert"]]),
    "bench": (_bench, [["bench", "--show"], ["calibrate"], ["collective", "explain"]]),
}  # fmt: skip


def _assert_harmless(words: list[str], capsys: Captured) -> str:
    main(words)
    printed = capsys.readouterr()
    found = RAW.search(printed.out + printed.err)
    assert found is None, (words, repr(printed.out + printed.err))
    return printed.out + printed.err


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["pipe", "terminal", "json", "quiet"])
def test_names_in_files_reach_no_terminal_as_they_are(
    way: str, mode: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, commands = WAYS[way]
    files = make(tmp_path)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("MESHWRIGHT_NO_PROGRESS", "1")
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    flags = {"json": ["--json"], "quiet": ["-q"]}.get(mode, [])
    if mode == "terminal":
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    shown = "".join(_assert_harmless([*words, *files, *flags], capsys) for words in commands)
    if mode == "pipe" and way in ("analyze", "hang", "memory", "models"):
        assert "\\x1b]0;owned\\x07" in shown


@pytest.mark.parametrize("mode", ["pipe", "terminal", "json"])
def test_names_of_jobs_reach_no_terminal_from_the_fleets_store(
    mode: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("duckdb")
    monkeypatch.setenv("TERM", "dumb")
    store = ["--store", str(tmp_path / "store")]
    flags = ["--json"] if mode == "json" else []
    if mode == "terminal":
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    files = _jobs(tmp_path)
    _assert_harmless(
        ["fleet", "ingest", *files, "--cluster", HOSTILE, *store, *flags, "-q"], capsys
    )
    _assert_harmless(["fleet", "ingest", *files, "--cluster", "east", *store, *flags, "-q"], capsys)
    shown = ""
    span = ["--since", "1970-01-01", "--until", "1970-01-02"]
    for verb in ("report", "patterns", "health"):
        words = [verb, *span] if verb != "health" else [verb]
        shown += _assert_harmless(["fleet", *words, *store, *flags], capsys)
    shown += _assert_harmless(["fleet", "top", *store, *flags], capsys)
    if mode == "pipe":
        assert "\\x1b]0;owned\\x07" in shown


@pytest.mark.parametrize(
    "words",
    [
        line.split()
        for line in [
            "analyze",
            " hang",
            " memory",
            " diff x",
            " roofline",
            " timeline show",
            " models",
            " clusters",
            " gpus",
            " layout check",
            " simulate",
            " whatif",
            " plan",
            " calibrate",
            " queue simulate",
            " fleet ingest",
            " twin",
            " watch",
            " bench --show",
            " train",
            " collective show",
            " validate",
            " parity",
            " data inspect",
            " convert",
            " launch ray",
            " no-such-command",
            " analyze --no-such-flag",
        ]
    ],
    ids=" ".join,
)
def test_a_path_that_is_not_there_is_named_without_control_characters(
    words: list[str], capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for flags in ([], ["--json"]):
        assert main([*words, f"{HOSTILE}/x", *flags]) != 0
        printed = capsys.readouterr()
        assert not RAW.search(printed.out + printed.err)


def test_commands_print_to_stderr_by_the_function_that_escapes() -> None:
    raw = re.compile(r"file=sys\.stderr|sys\.stderr\.write")
    allowed = {
        "render/safe_text.py",
        "render/progress.py",
        "render/terminal.py",
        "entry_point.py",
        "__init__.py",
    }
    places = {
        f"{path.parent.name}/{path.name}": line.strip()
        for path in (SOURCE / "cli").rglob("*.py")
        for line in path.read_text().splitlines()
        if raw.search(line) and "\\r\\x1b[K" not in line
    }
    assert {
        name: line for name, line in places.items()
        if not any(name.endswith(one) for one in allowed) and line != "print(file=sys.stderr)"
    } == {}  # fmt: skip
