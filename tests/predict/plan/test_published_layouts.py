"""Plans held against published layouts: the comparison itself, and the page that shows it."""

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from benchmarks.machine import describe
from meshwright.predict.step.step_prediction import predict_step
from meshwright.predict.validation.plans.layout_sample import RankEstimate
from meshwright.predict.validation.training import read_runs, score_run
from validation.plans import page, run
from validation.plans.compare import Compared, Row, Settings, compare
from validation.plans.questions import RUNS, Group, Published, groups, published
from validation.plans.run import Result

if not RUNS.exists():
    pytest.skip("needs the published runs of validation/training", allow_module_level=True)

ROWS = {row["id"]: row for row in read_runs(RUNS)}
QUICK = Settings(search_s=20.0, longest_s=20.0, draws=20, tries=400)
NAMED = (
    "torchao-llama3-8b-H100-bf16",
    "torchao-llama3-8b-H100-fp8-tensorwise",
    "foundry-a100_40gb-1b-s2048-g32-mb10-b320-bf16",
)


def _published(name: str) -> Published:
    found = published(ROWS[name])
    assert found is not None
    return found


@pytest.fixture(scope="module")
def compared() -> list[Compared]:
    return [compare(group, QUICK) for group in groups(map(_published, NAMED))]


def test_plans_are_at_least_as_fast_as_what_was_published(compared: list[Compared]) -> None:
    assert len(compared) == len(NAMED)
    for answer in compared:
        assert answer.proved, answer.trouble
        assert answer.plan_step_s is not None
        for row in answer.rows:
            assert row.fits
            assert answer.plan_step_s <= row.published_step_s * (1 + 1e-9), row.id


def test_no_layout_drawn_beats_the_plan(compared: list[Compared]) -> None:
    assert [(answer.drawn, answer.faster) for answer in compared] == [(20, 0)] * len(NAMED)


def test_published_layouts_are_ranked_among_others_and_among_those_alike(
    compared: list[Compared],
) -> None:
    for answer in compared:
        for row in answer.rows:
            assert row.rank is not None
            assert row.rank_alike is not None
            assert row.rank.draws == row.rank_alike.draws == 20
            assert row.rank.low <= row.rank.share <= row.rank.high


def test_a_layout_that_does_not_fit_has_no_rank() -> None:
    one = _published(NAMED[0])
    small = replace(one.question.cluster.gpu, memory_bytes=20 * 2**30)
    cluster = replace(one.question.cluster, gpu=small)
    question = replace(one.question, cluster=cluster)
    one = one._replace(question=question, layout=replace(one.layout, zero=0))
    (row,) = compare(Group("0", question, (one,)), replace(QUICK, longest_s=2.0, tries=5)).rows
    assert (row.fits, row.rank, row.rank_alike) == (False, None, None)


def test_a_search_is_stopped_once_it_beats_what_was_published() -> None:
    one = _published("dgxc-v25.05.05-Nemotron4-340B-H100-bf16-g256-b64")
    slow = one._replace(
        layout=replace(one.layout, recompute="full", schedule="gpipe", virtual_stages=1)
    )
    (group,) = groups([slow])
    answer = compare(group, Settings(search_s=0.0, longest_s=60.0, draws=1, tries=20))
    assert not answer.proved
    assert "stopped after" in answer.trouble
    assert answer.plan_step_s is not None
    assert answer.plan_step_s <= answer.rows[0].published_step_s


def test_a_plan_keeps_what_is_trained_and_in_which_formats() -> None:
    one = _published(NAMED[1])
    assert one.question.space.get_allowed("precision") == ("fp8-tensorwise",)
    assert one.question.workload.global_batch == ROWS[NAMED[1]]["global_batch"]
    assert one.question.space.get_allowed("tp") is None


def test_published_layouts_are_predicted_as_validation_predicts_them() -> None:
    for name in NAMED:
        one = _published(name)
        step_s = predict_step(one.question.build_run(one.layout)).step_s
        assert step_s == pytest.approx(score_run(ROWS[name]).predicted_step_s, rel=1e-12)


def test_models_have_as_many_learned_positions_as_their_runs_used() -> None:
    one = _published("foundry-h100_80gb-30b-s8192-g8-mb1-b168-bf16")
    assert one.question.model.max_positions == 8192
    assert one.question.build_job(one.layout).check() == ()


def test_operations_that_a_model_does_not_have_are_not_recomputed() -> None:
    one = _published("titan-nvfp4-Qwen3-8B-nvfp4")
    assert one.question.build_job(one.layout).check() == ()


def test_a_layout_is_whole_where_nothing_about_it_is_assumed() -> None:
    one = _published(NAMED[0])
    assert one.full
    assert one._replace(assumed=("adapters of rank 16",)).full
    for text in ("recompute none", "zero 3", "microbatch 1", "2 chunks per rank"):
        assert not one._replace(assumed=(text,)).full


def test_rows_that_ask_the_same_are_asked_once() -> None:
    one = _published(NAMED[0])
    other = one._replace(id="other", layout=replace(one.layout, zero=2))
    (group,) = groups([one, None, other])
    assert [row.id for row in group.rows] == [NAMED[0], "other"]


def _result(**changes: Any) -> Result:
    fields: dict[str, Any] = {
        "date": "2026-01-01", "machine": describe(), "jobs": 2, "settings": QUICK, "unread": 0,
        "missing": 0, "compared": (),
    }  # fmt: skip
    return Result(**{**fields, **changes})


def _answer(rows: list[Row], **changes: Any) -> Compared:
    fields: dict[str, Any] = {
        "key": "0", "plan_step_s": 1.0, "proved": True, "bound_s": 1.0, "search_s": 2.0,
        "layout": {}, "tried": 90, "drawn": 20, "faster": 0, "sample_s": 1.0, "rows": tuple(rows),
    }  # fmt: skip
    return Compared(**{**fields, **changes})


def _row(**changes: Any) -> Row:
    rank = RankEstimate(0.01, 0.0, 0.03, 100)
    fields: dict[str, Any] = {
        "id": "a", "source": "NeMo docs", "model": "m", "gpu": "H100", "gpus": 8,
        "global_batch": 8, "sequence_length": 8, "precision": "bf16", "full": True,
        "measured_step_s": 1.0, "published_step_s": 1.1, "fits": True, "rank": rank,
        "rank_alike": rank,
    }  # fmt: skip
    return Row(**{**fields, **changes})


def test_what_is_known_is_not_asked_again(tmp_path: Path) -> None:
    parts, found = tmp_path / "x.parts.jsonl", _answer([_row()])
    whole = msgspec.json.encode({"settings": QUICK, "compared": found})
    parts.write_bytes(whole + b"\n" + whole[:40])
    assert run.read_parts(parts, QUICK) == {"0": found}
    assert run.read_parts(parts, replace(QUICK, draws=7)) == {}
    assert run.read_parts(tmp_path / "none", QUICK) == {}


def test_damage_before_the_last_line_is_not_passed_over(tmp_path: Path) -> None:
    parts = tmp_path / "x.parts.jsonl"
    parts.write_bytes(b"{\n{\n")
    with pytest.raises(msgspec.DecodeError):
        run.read_parts(parts, QUICK)


def test_a_result_is_read_as_it_was_written(tmp_path: Path) -> None:
    result = _result(compared=(_answer([_row(rank=None)]), _answer([], key="1")))
    run.write(tmp_path / "x.json", result)
    assert run.read_result(tmp_path / "x.json") == result


def test_no_question_is_begun_after_the_time_is_up() -> None:
    (group,) = groups([_published(NAMED[2])])
    with run.workers(1) as pool:
        assert list(run.ask([group], QUICK, pool, 1, until_s=0.0)) == []
        (found,) = run.ask([group], QUICK, pool, 1, until_s=time.monotonic() + 60)
    assert found.key == group.key


def test_a_question_that_fails_does_not_take_the_others_with_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (group,) = groups([_published(NAMED[2])])
    broken = group._replace(key="no number")
    with run.workers(1) as pool:
        found = list(run.ask([broken, group], QUICK, pool, 1, until_s=time.monotonic() + 60))
    assert [one.key for one in found] == [group.key]
    assert f"{NAMED[2]} failed" in capsys.readouterr().err


def test_table_counts_by_source_and_puts_the_tuned_ones_together() -> None:
    high = RankEstimate(0.2, 0.1, 0.3, 100)
    rows = [_row(), _row(id="b", source="NVIDIA dgxc-benchmarking", rank=high), _row(source="blog")]
    text = page.section(_result(compared=(_answer(rows),)))
    assert "| NeMo docs | 1 | 100.0% | 10.0% | 1.0% | 100.0% | 1.0% | 100.0% |" in text
    assert "| **NVIDIA's tables** | 2 | 100.0% | 10.0% | 10.5% | 50.0% | 1.0% | 100.0% |" in text
    assert "| **all** | 3 |" in text
    assert "outside the top 5 %: 1 (`b`: 20.0%, 10.0% to 30.0%)" in text


def test_what_a_plan_does_not_beat_and_what_does_not_fit_is_named() -> None:
    rows = [_row(id="fast", published_step_s=0.9), _row(id="big", fits=False, rank=None)]
    text = page.section(_result(compared=(_answer(rows),), missing=3))
    assert "slower than what was published: 1 (`fast`: 10.00%)" in text
    assert "not to fit, and left out: 1 (`big`)" in text
    assert "| NeMo docs | 1 | 0.0% |" in text
    assert "3 questions were not asked yet" in text


def test_a_question_without_a_plan_counts_as_one_that_is_not_beaten() -> None:
    answer = _answer([_row()], plan_step_s=None, proved=False, trouble="no layout fits")
    text = page.section(_result(compared=(answer,)))
    assert "| NeMo docs | 1 | 0.0% | – |" in text
    assert "(`a`: no layout fits)" in text


def test_a_page_without_a_place_for_the_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no single place"):
        page.renewed("# Plans", None)


def test_page_is_up_to_date() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.renewed(text, page.newest()) == text, "run python -m validation.plans.page"
