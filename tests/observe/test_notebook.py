"""The names for notebooks: paths or timelines in, rows out, frames where pandas is there."""

import re
import sys
from pathlib import Path

import pytest

from meshwright import observe
from meshwright.errors import InputError, MissingDependency
from meshwright.timeline import write_timeline
from tests.observe.analyze.jobs import steady_job


def test_a_path_and_its_timeline_give_the_same_rows(tmp_path: Path) -> None:
    timeline = steady_job()
    write_timeline(timeline, tmp_path / "job")
    assert observe.breakdown(tmp_path / "job") == observe.breakdown(timeline)
    there, here = observe.analyze_run(tmp_path / "job"), observe.analyze_run(timeline)
    assert there._replace(path="timeline") == here


def test_rows_become_a_frame_with_derived_figures() -> None:
    pandas = pytest.importorskip("pandas")
    frame = observe.breakdown(steady_job()).to_frame()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["rank"]) == [0, 1, 2, 3]
    assert (frame["window_ns"] >= frame["compute_ns"]).all()


def test_rows_of_steps_and_kernels_have_their_rank() -> None:
    pytest.importorskip("pandas")
    assert set(observe.steps(steady_job()).to_frame()["rank"]) == {0, 1, 2, 3}
    assert list(observe.kernels(steady_job(), rank=1).to_frame()["rank"]) == [1, 1]


def test_a_rank_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(InputError, match="name one of 0, 1"):
        observe.breakdown(steady_job(ranks=2), rank=7)


def test_timelines_are_compared_under_a_short_name() -> None:
    job = steady_job(ranks=1)
    assert observe.diff(job, job).a.label == "measured timeline"


def test_without_pandas_only_the_frame_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    rows = observe.overlap(steady_job())
    with pytest.raises(MissingDependency, match="pandas"):
        rows.to_frame()


def test_every_exported_analysis_takes_a_timeline() -> None:
    job = steady_job(compute_us=lambda rank, _step: 1300.0 if rank == 2 else 900.0)
    for name in (
        "idle",
        "launches",
        "mfu",
        "overlap",
        "roofline",
        "collectives",
        "find_inefficiencies",
    ):
        getattr(observe, name)(job)
    assert observe.stragglers(job).single_straggler == 2
    assert observe.critical_path(job, step=3).total_ns > 0
    assert observe.diff(job, job).cost_ns == 0


def test_the_guide_has_an_example_of_every_name_and_all_of_them_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pandas")
    page = Path(__file__).parents[2] / "docs" / "guide" / "observe.md"
    code = page.read_text(encoding="utf-8").partition("## In a notebook")[2].split("```")[1]
    assert {name for name in observe.__all__ if not re.search(rf"\b{name}\b", code)} == set()
    for name in ("traces", "before", "after"):
        write_timeline(steady_job(steps=12, compute_us=_last_is_slow), tmp_path / name)
    monkeypatch.chdir(tmp_path)
    exec(code.removeprefix("python"), {})


def _last_is_slow(rank: int, _step: int) -> float:
    return 1300.0 if rank == 3 else 900.0
