"""`mw analyze`: one screen, figures for scripts, a report, a marked trace."""

import gzip
import json
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.timeline import write_timeline
from meshwright.timeline.timeline import Timeline
from tests.observe.analyze.jobs import steady_job
from tests.observe.analyze.traces import call, host, kernel, step
from tests.observe.analyze.traces import timeline as one_rank
from validation.findings.clean_jobs import clean_job

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """Four ranks and eight steps; rank 2 computes longer."""
    timeline = steady_job(compute_us=lambda rank, _step: 1300.0 if rank == 2 else 900.0)
    return _written(timeline, tmp_path / "job")


def _written(timeline: Timeline, folder: Path) -> Path:
    folder.parent.mkdir(exist_ok=True)
    write_timeline(timeline, folder)
    return folder


def test_the_screen_shows_bar_steps_overlap_kernels_straggler_and_what_next(
    job: Path, capsys: Captured
) -> None:
    assert main(["analyze", str(job)]) == 0
    printed = capsys.readouterr().out
    assert "4 ranks" in printed
    assert "█" in printed
    assert "8 on each rank" in printed
    assert "of communication is hidden" in printed
    assert "gemm" in printed
    assert "stragglers\trank 2" in printed
    assert f"next: mw analyze {job} --ranks 2" in printed
    assert len(printed.splitlines()) < 45


def test_a_trace_without_device_work_draws_no_empty_bars(tmp_path: Path, capsys: Captured) -> None:
    event = '{"ph":"X","cat":"cpu_op","name":"aten::mm","pid":1,"tid":1,"ts":1,"dur":5}'
    (tmp_path / "host only.json").write_text(f'{{"traceEvents": [{event}]}}')
    assert main(["analyze", str(tmp_path / "host only.json")]) == 0
    printed = capsys.readouterr().out
    assert "next: record with ProfilerActivity.CUDA" in printed
    assert "where the time goes" not in printed
    assert "--html" not in printed


def test_parts_of_every_rank_add_up_to_its_window(job: Path, capsys: Captured) -> None:
    main(["analyze", str(job), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == "meshwright.analyze/2"
    for rank in answer["ranks"]:
        parts = ("compute", "exposed_communication", "exposed_memory_copy", "idle")
        assert sum(rank[f"{part}_ms"] for part in parts) == pytest.approx(rank["window_ms"])
    assert answer["rank_comparison"]["straggler"] == 2


def test_the_keys_of_the_json_stay_as_its_schema_has_them(job: Path, capsys: Captured) -> None:
    main(["analyze", str(job), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert {
        "excluded_spans", "num_counted_steps", "recompiled_regions", "host_stalls",
    } <= set(answer["ranks"][0])  # fmt: skip
    compared = answer["rank_comparison"]
    assert set(compared) == {
        "clocks_shared", "clock_offsets_ns", "straggler", "straggler_ranks", "pattern", "span_ms",
        "arrivals", "slow_links", "num_mismatches", "only_collectives", "collectives",
    }  # fmt: skip
    assert set(compared["arrivals"][0]) == {
        "rank", "collectives", "num_times_last", "wait_ms", "caused_ms", "avoidable_wait_ms",
        "avoidable_wait_with_group_ms", "kernel_slowdown", "cause",
    }  # fmt: skip
    assert {"achieved_share", "expected_is_assumed"} <= set(compared["collectives"][0])
    assert all(
        set(one) == {"change", "speedup_share"} for one in answer["critical_path"]["what_if"]
    )
    assert set(answer["findings"][0]) == {
        "name", "title", "family", "evidence", "ranks", "cost_ms_per_step", "cost_basis",
        "gpu_share", "remedy", "spans", "explained_by",
    }  # fmt: skip


@pytest.mark.real
@pytest.mark.parametrize(
    ("name", "figures", "overlap"),
    [
        ("8rank-h100-2025-12-11/rank-0", (10985, 98325, 28147, 137457), 11.59),
        ("8rank-h100-2025-12-11/rank-1", (28704, 87810, 12341, 128855), 18.10),
        ("8rank-h100-2025-12-11/rank-3", (4429, 117427, 46317, 168174), 11.37),
        ("8rank-h100-2025-12-11/rank-7", (3861, 114675, 36255, 154791), 8.96),
        ("ab-2025-10-31/current", (4372, 225231, 13642, 243245), 29.53),
        ("ab-2025-10-31/hook", (4387, 223673, 12803, 240863), 34.42),
    ],
)
def test_the_breakdown_of_real_traces_is_of_the_recorded_window(
    shared: Path, capsys: Captured, name: str, figures: tuple[int, ...], overlap: float
) -> None:
    trace = shared / "traces" / "modded-nanogpt" / f"{name}.json.gz"
    main(["analyze", str(trace), "--json", "--no-cache"])
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    rest_ms = rank["exposed_communication_ms"] + rank["exposed_memory_copy_ms"]
    parts = (rank["idle_ms"], rank["compute_ms"], rest_ms, rank["window_ms"])
    assert tuple(round(1000 * ms) for ms in parts) == figures
    assert round(100 * rank["overlap"], 2) == overlap
    assert rank["num_counted_steps"] == 3
    assert rank["whole_steps"]["window_ms"] < rank["window_ms"]


def test_the_recorded_window_and_whole_steps_are_told_apart(job: Path, capsys: Captured) -> None:
    main(["analyze", str(job), "--json"])
    for rank in json.loads(capsys.readouterr().out)["ranks"]:
        whole = rank["whole_steps"]
        assert sum(rank["idle"].values()) == pytest.approx(whole["idle_ms"])
        assert set(whole) < set(rank)
    main(["analyze", str(job)])
    assert "\ncounted\t7 whole steps, in all figures\n" in capsys.readouterr().out


def test_a_device_that_trails_has_more_in_its_window(tmp_path: Path, capsys: Captured) -> None:
    rows = []
    for number in (1, 2, 3):
        rows += [
            step(number, 1000 * number, 1000 * number + 1000),
            call(1000 * number + 100, 1000 * number + 110, flow_out=number),
            kernel(1000 * number + 900, 1000 * number + 1800, flow_in=number),
        ]
    mark = host(3900, 4800, "ProfilerStep#3", process="gpu 0", lane="marks")
    write_timeline(one_rank(*rows, mark), tmp_path / "job")
    main(["analyze", str(tmp_path / "job")])
    line = "time and overlap: the recorded window; figures per step: 2 whole steps"
    assert line in capsys.readouterr().out


def test_many_ranks_are_told_by_least_median_and_most(tmp_path: Path, capsys: Captured) -> None:
    folder = _written(steady_job(ranks=20, steps=4), tmp_path / "job")
    main(["analyze", str(folder)])
    printed = capsys.readouterr().out
    assert "least compute" in printed
    assert "of 20 ranks" in printed
    assert len(printed.splitlines()) < 45


def test_a_trace_without_steps_tells_costs_of_the_whole(tmp_path: Path, capsys: Captured) -> None:
    rows = [
        call(0, 10, flow_out=1), kernel(20, 1_000_000, flow_in=1),
        call(3_000_000, 3_000_010, flow_out=2), kernel(3_000_020, 4_000_000, flow_in=2),
    ]  # fmt: skip
    write_timeline(one_rank(*rows), tmp_path / "job")
    main(["analyze", str(tmp_path / "job")])
    printed = capsys.readouterr().out
    assert "ms per trace\tof GPU time" in printed
    assert "2.00\t50.0 %" in printed


def test_screen_and_findings_agree_on_why_a_rank_is_late(tmp_path: Path, capsys: Captured) -> None:
    for part in clean_job(ranks=4, pause=lambda rank, _: 8_000_000 if rank == 3 else 0):
        _written(part, tmp_path / "job" / f"rank{part.ranks[0]}")
    main(["analyze", str(tmp_path / "job")])
    printed = capsys.readouterr().out
    assert "One rank's host is slow" in printed
    assert "for it; its host is late" in printed


def test_the_report_draws_the_rank_that_a_finding_names(tmp_path: Path) -> None:
    for part in clean_job(ranks=12, steps=4, pause=lambda rank, _: 8_000_000 * (rank == 11)):
        _written(part, tmp_path / "job" / f"rank{part.ranks[0]}")
    page = tmp_path / "report.html"
    main(["analyze", str(tmp_path / "job"), "--html", str(page), "-q"])
    data = json.loads(_between(page.read_text(encoding="utf-8")))
    drawn = [strip["rank"] for strip in data["strips"]]
    assert len(drawn) == 8
    assert 11 in drawn
    late = next(one for one in data["findings"] if one["name"] == "straggler-host-bound")
    assert {rank for rank, _, _ in late["spans"]} == {11}


def test_ranks_and_steps_are_chosen(job: Path, capsys: Captured) -> None:
    main(["analyze", str(job), "--ranks", "0,3", "--steps", "2-4", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in answer["ranks"]] == [0, 3]
    assert [step["number"] for step in answer["ranks"][0]["steps"]] == [2, 3, 4]
    assert answer["ranks"][0]["num_counted_steps"] == 3


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ranks", "9"], "has none of these ranks"),
        (["--ranks", "x"], "is no list of numbers"),
        (["--steps", "99"], "has no step 99"),
        (["--num-workers", "0"], "is no number of processes"),
        (["--compat", "hta", "--html", "r.html"], "prints figures only"),
        (["--annotation", "forward"], "as HTA tells it"),
    ],
)
def test_a_wrong_flag_is_named_with_its_fix(
    job: Path, capsys: Captured, flags: list[str], said: str
) -> None:
    assert main(["analyze", str(job), *flags]) == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert "hint:" in printed


def test_two_traces_of_one_rank_are_refused(tmp_path: Path, capsys: Captured) -> None:
    for name in ("a", "b"):
        _written(steady_job(ranks=1), tmp_path / "both" / name)
    assert main(["analyze", str(tmp_path / "both")]) == 2
    assert "mw diff" in capsys.readouterr().err


def test_processes_give_the_same_answer(tmp_path: Path, capsys: Captured) -> None:
    whole = steady_job()
    for part in whole.split_by_rank():
        _written(part, tmp_path / "job" / f"rank{part.ranks[0]}")
    main(["analyze", str(tmp_path / "job"), "--json"])
    alone = capsys.readouterr().out
    main(["analyze", str(tmp_path / "job"), "--json", "--num-workers", "2"])
    assert json.loads(capsys.readouterr().out) == json.loads(alone)


def test_the_marked_trace_has_a_lane_of_the_critical_path(job: Path, tmp_path: Path) -> None:
    out = tmp_path / "marked.json.gz"
    assert main(["analyze", str(job), "--perfetto", str(out), "-q"]) == 0
    events = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    lanes = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert "meshwright: critical path" in lanes
    assert any(event["name"] == "kernel: gemm" for event in events)


def test_a_trace_without_device_work_is_shown_and_marked(tmp_path: Path, capsys: Captured) -> None:
    folder = _written(steady_job(ranks=1).select(kinds=["host"]), tmp_path / "job")
    assert main(["analyze", str(folder), "--perfetto", str(tmp_path / "marked.json")]) == 0
    printed = capsys.readouterr().out
    assert "no device work" in printed
    assert "findings: none can be told" in printed


class _Outside(HTMLParser):
    """Collects what a page would load."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self.found += [value or "" for name, value in attrs if name in {"src", "href"}]


def test_the_report_needs_nothing_from_outside_and_names_cannot_break_it(
    tmp_path: Path, capsys: Captured
) -> None:
    evil = "</script><script>alert(1)</script>"
    timeline = steady_job()
    names = timeline.spans.column("name").to_pylist()
    place = timeline.spans.column_names.index("name")
    renamed = [evil if name == "gemm" else name for name in names]
    spans = {
        name: timeline.spans.column(name).to_pylist() for name in timeline.spans.column_names
    } | {timeline.spans.column_names[place]: renamed}
    folder = _written(Timeline.from_columns(spans, source="measured"), tmp_path / "job")
    page = tmp_path / "report.html"
    assert main(["analyze", str(folder), "--html", str(page)]) == 0
    text = page.read_text(encoding="utf-8")
    parser = _Outside()
    parser.feed(text)
    assert parser.found == []
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in text
    assert evil not in text
    assert text.count("<script") == 2


def test_the_size_of_a_report_does_not_grow_with_the_trace(tmp_path: Path) -> None:
    sizes = []
    for steps in (700, 1000):
        folder = _written(steady_job(ranks=1, steps=steps), tmp_path / f"job{steps}")
        page = tmp_path / f"{steps}.html"
        main(["analyze", str(folder), "--html", str(page), "-q"])
        text = page.read_text(encoding="utf-8")
        sizes.append(len(json.loads(_between(text))["strips"][0]["spans"]))
    assert sizes[0] == sizes[1] == 1200


def _between(text: str) -> str:
    start = text.index('id="data">') + len('id="data">')
    return text[start : text.index("</script>", start)].replace("\\u003c", "<")


def test_the_report_draws_itself_in_a_browser(job: Path, tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser")
    if browser is None:
        pytest.skip("needs Chromium to draw the report")
    page = tmp_path / "report.html"
    main(["analyze", str(job), "--html", str(page), "-q"])
    shown = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=2000",
         f"--user-data-dir={tmp_path / 'browser'}", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    assert shown.count('class="bar"') == 4
    assert shown.count("<circle") == 32
    assert ">gemm</td>" in shown
    assert "0 to " in shown, "the timeline was not drawn"


def test_of_several_captures_the_last_is_shown_and_named(tmp_path: Path, capsys: Captured) -> None:
    event = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "dur": 4}
    for number in (1, 2, 3):
        document = {
            "distributedInfo": {"rank": 5},
            "traceEvents": [{**event, "ts": 1000 * number + step} for step in (0, 10)],
        }
        (tmp_path / f"{number}.json").write_text(json.dumps(document))
    assert main(["analyze", str(tmp_path)]) == 0
    assert "3 of 3 of rank 5 (3.json); --capture 1 shows the first" in capsys.readouterr().out
    assert main(["analyze", str(tmp_path), "--capture", "2"]) == 0
    assert "2 of 3 of rank 5 (2.json)" in capsys.readouterr().out
    assert main(["analyze", str(tmp_path), "--capture", "x"]) == 2
    assert "1 for the first" in capsys.readouterr().err
