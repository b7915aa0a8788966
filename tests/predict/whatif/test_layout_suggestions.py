"""The changes on offer are sound, fit, help, and say what they bring."""

import msgspec
import pytest

from meshwright.predict import TrainingRun, predict_memory, predict_step
from meshwright.predict.whatif.layout_suggestions import (
    MIN_GAIN,
    LayoutSuggestions,
    list_neighbours,
    suggest_layouts,
)
from meshwright.spec import JobSpec, Layout, TrainingWorkload, catalog


def work(
    model: str, cluster: str, layout: Layout, *, length: int = 4096, batch: int = 512
) -> JobSpec:
    return JobSpec(
        model=catalog.get_model(model),
        cluster=catalog.get_cluster(cluster).with_gpus(layout.gpus),
        layout=layout,
        workload=TrainingWorkload(tokens=10**12, sequence_length=length, global_batch=batch),
    )


GPT = work("gpt3-175b", "a100-superpod", Layout(tp=8, pp=8, dp=4, recompute="full"), length=2048)
LLAMA = work("llama3.1-8b", "h100-superpod", Layout(tp=2, dp=16, zero=1, overlap_gradients=False))
MOE = work("mixtral-8x7b", "h100-superpod", Layout(pp=4, dp=8, ep=8, zero=1, recompute="full"))
TOO_LARGE = work("llama3.1-70b", "h100-superpod", Layout(tp=4, pp=4, dp=8), length=8192)
WORKS = {"gpt": GPT, "llama": LLAMA, "moe": MOE, "too large": TOO_LARGE}


@pytest.fixture(scope="module", params=WORKS, ids=str)
def advised(request: pytest.FixtureRequest) -> tuple[JobSpec, LayoutSuggestions]:
    one = WORKS[request.param]
    return one, suggest_layouts(one)


def test_at_most_three_of_different_kinds(advised: tuple[JobSpec, LayoutSuggestions]) -> None:
    kinds = [change.kind for change in advised[1].best]
    assert 0 < len(kinds) <= 3
    assert len(set(kinds)) == len(kinds)


def test_every_change_brings_what_it_says(advised: tuple[JobSpec, LayoutSuggestions]) -> None:
    base, advice = advised
    now = predict_step(TrainingRun(base)).step_s
    for change in (*advice.best, *([advice.combined_gain] if advice.combined_gain else [])):
        layout = msgspec.structs.replace(base.layout, **change.fields)
        changed = msgspec.structs.replace(base, layout=layout)
        assert [problem for problem in changed.check() if problem.where != "memory"] == []
        assert layout.gpus == base.layout.gpus
        assert predict_step(TrainingRun(changed)).step_s == change.step.step_s
        assert predict_memory(TrainingRun(changed)) == change.memory
        assert change.gain == pytest.approx(1 - change.step.step_s / now)


@pytest.mark.parametrize("base", [GPT, LLAMA, MOE], ids=["gpt", "llama", "moe"])
def test_changes_of_what_fits_fit_and_come_in_order_of_time(base: JobSpec) -> None:
    assert predict_memory(TrainingRun(base)).fits
    best = suggest_layouts(base).best
    assert all(change.memory.fits and change.gain >= MIN_GAIN for change in best)
    assert [change.gain for change in best] == sorted((c.gain for c in best), reverse=True)


def test_what_does_not_fit_is_made_to_fit_first() -> None:
    assert not predict_memory(TrainingRun(TOO_LARGE)).fits
    advice = suggest_layouts(TOO_LARGE)
    assert advice.best[0].saved_bytes > 0
    fitting = [change.memory.fits for change in advice.best]
    assert fitting == sorted(fitting, reverse=True)
    assert fitting[0] or (advice.combined_gain is not None and advice.combined_gain.memory.fits)


def test_together_is_better_than_the_best_alone() -> None:
    advice = suggest_layouts(GPT)
    assert advice.combined_gain is not None
    assert len(advice.combined_changes) >= 2
    assert advice.combined_gain.step.step_s < advice.best[0].step.step_s


def test_recompute_that_memory_does_not_need_is_named() -> None:
    roomy = work("llama3.1-8b", "h100-superpod", Layout(dp=32, zero=1, recompute="full"))
    kept = next(change for change in suggest_layouts(roomy).best if change.kind == "recompute")
    assert kept.fields["recompute"] == "none"


def test_a_switch_left_off_is_named() -> None:
    kinds = {change.kind for change in suggest_layouts(LLAMA, most=10).best}
    assert "overlap_tp" in kinds


def test_fp8_is_marked_as_changing_numerics() -> None:
    found = [c for c in suggest_layouts(LLAMA, most=10).best if c.changes_numerics]
    assert [change.kind for change in found] == ["precision"]


def test_fp8_is_not_offered_where_the_gpu_has_none() -> None:
    assert "precision" not in {proposal.kind for proposal in list_neighbours(GPT)}


def test_every_schedule_has_rivals() -> None:
    folded = msgspec.structs.replace(GPT.layout, schedule="zb-v", virtual_stages=2)
    kinds = {one.kind for one in list_neighbours(msgspec.structs.replace(GPT, layout=folded))}
    assert "schedule" in kinds


def test_experts_are_moved_only_where_there_are_some() -> None:
    assert "experts" in {proposal.kind for proposal in list_neighbours(MOE)}
    assert "experts" not in {proposal.kind for proposal in list_neighbours(GPT)}
