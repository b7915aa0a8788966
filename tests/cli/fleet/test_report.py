"""`mw fleet report` and `mw fleet top`: one screen, a page, data, and names that do not leak."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.cli import main
from meshwright.cli.fleet.report_screen import MAX_LINES, format_clusters, render_report
from meshwright.cli.result import BarView, FieldsView, TableView
from meshwright.fleet.account import BUCKETS, build_account
from meshwright.fleet.account.prices import parse_prices
from meshwright.fleet.account.report import build_report, list_caveats
from meshwright.fleet.store import FleetStore
from tests.fleet.account.rows import DAY, HOUR, jobs, nodes, progress

pytest.importorskip("duckdb")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight days of two nodes: Ann trains by day, Bob fails, somebody waits."""
    folder = tmp_path_factory.mktemp("fleet") / "store"
    work = [
        {"job": f"a{day}", "user": "ann.alder", "team": "vision", "submit_s": day * DAY,
         "start_s": day * DAY, "end_s": day * DAY + 16 * HOUR, "gpus": 8.0, "nodes": ["n1"]}
        for day in range(8)
    ]  # fmt: skip
    work += [
        {"job": "b", "user": "bob.birch", "team": "speech", "submit_s": 5 * DAY,
         "start_s": 6 * DAY, "end_s": 7 * DAY, "gpus": 4.0, "nodes": ["n2"], "state": "failed"},
        {"job": "c", "user": "bob.birch", "submit_s": 7 * DAY, "gpus": 16.0, "state": "pending"},
        {"job": "d", "user": "cyd.cedar", "submit_s": 7 * DAY, "start_s": 7 * DAY, "gpus": 2.0,
         "nodes": ["n2"], "state": "running", "seen_s": 8 * DAY},
    ]  # fmt: skip
    with FleetStore(folder, create=True) as kept:
        kept.put("jobs", jobs(*work))
        kept.put("nodes", nodes({"node": "n1"}, {"node": "n2"}))
        kept.put("progress", progress(("a7", 7 * DAY, 7 * DAY + HOUR, "startup")))
    return folder


def asked(store: Path, *words: str) -> int:
    return main(["fleet", *words, "--store", str(store)])


def test_the_buckets_of_a_report_make_up_all_hours(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--since", "7d", "--until", "1970-01-09", "--price", "2", "--json")
    assert asked(store, "report", *words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == "meshwright.fleet-report/2"
    assert told["gpu_hours"] == 7 * 24 * 16
    assert sum(one["gpu_hours"] for one in told["buckets"].values()) == pytest.approx(2688)
    assert told["buckets"]["lost_work"]["gpu_hours"] == 96
    assert told["buckets"]["startup"]["by_evidence"] == {"progress": 8}
    assert told["buckets"]["lost_work"]["dollars"] == 192
    assert [one["name"] for one in told["groups"]["user"]] == [
        "ann.alder",
        "bob.birch",
        "cyd.cedar",
    ]
    assert len(told["trend"]) == 7


def test_a_report_is_held_against_the_time_before(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(store, "report", "--since", "1d", "--until", "1970-01-08", "--before") == 0
    # Bob's four GPUs failed on that day; on the day before he waited though there was a place.
    assert "failed work lost +25.0, free: queue order -25.0 points" in capsys.readouterr().out


def test_a_redacted_report_names_nobody(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "week.html"
    words = ("--until", "1970-01-09", "--redact", "--html", str(page))
    assert asked(store, "report", *words) == 0
    screens = capsys.readouterr().out + page.read_text()
    assert asked(store, "report", *words, "--json") == 0
    data = capsys.readouterr().out
    assert asked(store, "top", "--at", "1970-01-09", "--redact", "--by", "user") == 0
    top = capsys.readouterr().out
    for name in ("ann", "bob", "cyd", "alder", "birch", "cedar"):
        assert not re.search(rf"\b{name}\b", screens + data + top)
    names = [one["name"] for one in json.loads(data)["groups"]["user"]]
    assert names[2] in top


def test_the_page_stands_alone(store: Path, tmp_path: Path) -> None:
    page = tmp_path / "week.html"
    assert asked(store, "report", "--until", "1970-01-09", "--html", str(page), "-q") == 0
    text = page.read_text()
    assert "GPU-hours of c, day 1 to day 8" in text
    assert "failed work lost" in text
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", text)
    assert "<script" not in text
    assert text.count("<rect") >= 7


def test_a_screen_is_never_longer_than_a_screen() -> None:
    states = ("down", "draining", "reserved", "unknown")
    there = nodes({"node": "n1"}, {"node": "n2"}, *({"node": s, "state": s} for s in states))
    work: list[dict[str, Any]] = [
        {"job": str(at), "user": f"user {at}", "start_s": at * HOUR, "end_s": at * HOUR + DAY,
         "submit_s": 0.0, "gpus": 1.0, "nodes": ["n1"], "state": ("failed", "completed")[at % 2]}
        for at in range(60)
    ]  # fmt: skip
    waits: tuple[dict[str, Any], ...] = (
        {"gpus": 16.0, "num_nodes": 2},
        {"gpus": 1.0, "reason": "QOSGrpGRES"},
        {"gpus": 1.0},
    )
    work += [
        {"job": f"w{at}", "submit_s": at * DAY, "state": "pending", **one}
        for at, one in enumerate(waits)
    ]
    phases = ("startup", "checkpoint", "data_wait", "communication", "productive")
    told = progress(
        *(("1", (1 + at) * HOUR, (2 + at) * HOUR, name) for at, name in enumerate(phases))
    )
    found = build_account(jobs(*work), there, progress=told, since_s=0, until_s=7 * DAY)
    assert sum(1 for amount in found.sum_buckets().values() if amount) >= len(BUCKETS) - 4
    views = render_report(build_report(found, parse_prices("2"), "user", 20))
    lines = len(views) - 1
    for view in views:
        assert not isinstance(view, BarView)
        lines += len(view.rows) + 3 if isinstance(view, TableView) else 0
        lines += len(view.fields) if isinstance(view, FieldsView) else 0
    assert lines <= MAX_LINES


def test_top_tells_who_holds_what_and_who_waits(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(store, "top", "--at", "1970-01-08T12:00", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["gpus"]) for one in told["groups"]] == [
        ("ann.alder", pytest.approx(8)), ("cyd.cedar", pytest.approx(2)),
        ("bob.birch", 0),
    ]  # fmt: skip
    assert told["groups"][-1]["pending_hours"] == pytest.approx(16 * told["duration_s"] / 3600)
    assert (told["gpus"], told["allocated"]) == (pytest.approx(16), pytest.approx(10))
    assert (told["pending_jobs"], told["pending_gpus"]) == (1, 16)


def test_top_of_jobs_tells_whose_they_are(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert asked(store, "top", "--at", "1970-01-08T12:00", "--by", "job", "--top", "1") == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-2].split("\t")[:5] == ["job", "GPUs", "at the end", "user", "for"]
    assert told[-1].split("\t")[:5] == ["a7", "8.0", "8.0", "ann.alder", "12 h"]


def test_top_tells_what_is_held_at_the_end_beside_the_mean_and_over_what_it_is_taken(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Ann's job of day 7 began five minutes before.
    assert asked(store, "top", "--at", "1970-01-08T00:05", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    ann = next(one for one in told["groups"] if one["name"] == "ann.alder")
    assert (ann["gpus"], ann["gpus_at_end"]) == (pytest.approx(8 / 3), 8)
    assert told["allocated_at_end"] == 10
    assert asked(store, "top", "--at", "1970-01-08T00:05") == 0
    assert "mean of 15 min" in capsys.readouterr().out


def test_a_report_tells_which_attempts_lie_outside_of_its_time(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(store, "report", "--since", "1d", "--until", "1970-01-09") == 0
    said = capsys.readouterr().err
    assert "8 of 10 attempts lie outside of this time: all ran from day 0 to day 8" in said
    assert "--since 'day 0' takes all of it" in said
    assert asked(store, "report", "--since", "day 0", "--until", "1970-01-09", "--json") == 0
    assert json.loads(capsys.readouterr().out)["attempts_outside"]["num_outside"] == 0


def test_held_hours_that_nothing_measured_are_not_called_productive(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(store, "report", "--since", "1d", "--until", "1970-01-02", "--json") == 0
    buckets = json.loads(capsys.readouterr().out)["buckets"]
    assert buckets["productive"]["gpu_hours"] == 0
    assert buckets["unmeasured"]["gpu_hours"] == 128


def test_a_time_of_which_nothing_is_known_is_said_to_be_so(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A node without an end is still there long after, so the time before all is asked for.
    assert asked(store, "report", "--since", "1969-11-01", "--until", "1969-12-01") == 0
    assert "nothing is known of this time" in capsys.readouterr().err


def test_a_time_of_which_little_is_known_is_said_to_be_so(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(store, "report", "--since", "1969-12-25", "--until", "1970-01-03") == 0
    told = capsys.readouterr()
    assert "; nothing is known before day 0\n" in told.out
    assert "no job is known" not in told.err
    assert asked(store, "report", "--since", "7d", "--until", "1970-01-09") == 0
    assert "nothing is known" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("work", "said"),
    [
        ([], "no job is known of this time: all that was up counts as free"),
        ([{"job": "1", "start_s": 5 * DAY, "end_s": 6 * DAY, "gpus": 8.0}],
         "no job is known before day 5: what was free until then"),
    ],
)  # fmt: skip
def test_free_hours_without_a_job_beside_them_are_remarked(
    work: list[dict[str, Any]], said: str
) -> None:
    found = build_account(jobs(*work), nodes({"node": "n1"}), since_s=0, until_s=7 * DAY)
    report = build_report(found, parse_prices(None), "user", 5)
    assert any(note.startswith(said) for note in list_caveats(report))
    assert bool(report.forecast) == bool(work)


def test_many_clusters_are_named_in_one_order() -> None:
    work = [
        {"job": "1", "cluster": name, "start_s": 0, "end_s": DAY, "gpus": 1.0} for name in "dbca"
    ]
    found = build_account(jobs(*work), None, since_s=0, until_s=DAY)
    assert format_clusters(found) == "a and 3 more clusters"


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("report", "--cluster", "west"), "'west' is not in the store"),
        (("report", "--gpus", "west=8"), "does not say of which cluster"),
        (("report", "--price", "cheap"), "is no price"),
        (("report", "--since", "2038-01-01"), "is not before"),
    ],
)
def test_what_is_wrong_is_said(
    store: Path, words: tuple[str, ...], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert asked(store, *words) == 2
    assert fault in capsys.readouterr().err
