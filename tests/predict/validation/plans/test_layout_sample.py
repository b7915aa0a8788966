"""Layouts drawn at random: which they are, how likely each is, and what a rank says."""

import random
from collections import Counter
from typing import Any

import pytest

from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.plan import LayoutSpace, PlanQuestion, find_plans
from meshwright.predict.plan.question.plan_question import OFFLOADS
from meshwright.predict.plan.space.degree_splits import DegreeSplits
from meshwright.predict.validation.plans.layout_sample import (
    LayoutSample,
    LayoutSampler,
    is_feasible,
    sample_layouts,
    wilson_interval,
)
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model, MoESpec, build_decoder_model
from meshwright.spec.workload import TrainingWorkload
from tests.predict.plan.exhaustive import Every

DENSE = build_decoder_model(
    "dense", layers=6, hidden=1024, heads=8, kv_heads=4, ffn=4096, vocab=32000
)
SPARSE = build_decoder_model(
    "sparse", layers=4, hidden=1024, heads=8, kv_heads=4, ffn=4096, vocab=32000,
    experts=MoESpec(count=8, top_k=2, width=1024),
)  # fmt: skip
Fixed = dict[str, tuple[Any, ...]]

ALIKE: Fixed = {
    "order": ("tp-cp-ep-dp-pp",),
    "overlap_gradients": (True,),
    "overlap_parameters": (True,),
    "overlap_tp": (False,),
    "overlap_pp": (True,),
    "overlap_ep": (False,),
    "offload": ((),),
}


def _question(fixed: Fixed | None = None, *, model: Model = DENSE, gpus: int = 8) -> PlanQuestion:
    return PlanQuestion(
        model=model,
        cluster=catalog.get_cluster("h100-superpod").with_gpus(gpus),
        workload=TrainingWorkload(tokens=10**9, sequence_length=2048, global_batch=16),
        space=LayoutSpace(fixed=fixed or {}),
    )


def _drawn(question: PlanQuestion, times: int) -> list[Layout]:
    draws = LayoutSampler(question, random.Random(1))
    return [
        layout for layout in (draws.sample_layout() for _ in range(times)) if layout is not None
    ]


@pytest.mark.parametrize("model", [DENSE, SPARSE], ids=lambda model: model.name)
def test_every_layout_found_is_sound_and_fits(model: Model) -> None:
    question = _question(model=model, gpus=16)
    found = sample_layouts(question, feasible=60, tries=600).fastest
    assert len(found) == 60
    for one in found:
        problems = question.build_job(one.layout).check()
        assert [problem for problem in problems if problem.where != "memory"] == []
        assert predict_memory(question.build_run(one.layout)).fits
        assert one.layout.gpus == 16


def test_nothing_is_drawn_that_the_space_does_not_allow() -> None:
    fixed: Fixed = {
        "tp": (2, 4), "zero": (1,), "schedule": ("1f1b",), "recompute": ("none", "full"),
        "recompute_layers": (1,), "offload": ((),), "overlap_gradients": (False,),
    }  # fmt: skip
    for layout in _drawn(_question(fixed), 300):
        assert layout.tp in (2, 4)
        assert layout.zero == (1 if layout.dp * layout.cp > 1 else 0)
        assert (layout.schedule, layout.recompute_ops, layout.offload) == ("1f1b", (), ())
        assert layout.recompute == "none" or layout.recompute_layers in (1, None)
        assert layout.dp * layout.cp == 1 or not layout.overlap_gradients


def test_every_field_is_drawn_from_all_that_applies() -> None:
    layouts = _drawn(_question(gpus=16, fixed={"offload": OFFLOADS}), 2000)
    for name, least in {
        "tp": 4, "cp": 3, "pp": 3, "dp": 5, "microbatch": 4, "sequence_parallel": 2, "cp_kind": 3,
        "schedule": 7, "virtual_stages": 3, "stage_layers": 3, "recompute": 3, "recompute_ops": 10,
        "recompute_layers": 5, "zero": 4, "shard": 3, "overlap_gradients": 2,
        "overlap_parameters": 2, "overlap_tp": 2, "overlap_pp": 2, "offload": 8,
        "offload_layers": 5, "order": 10,
    }.items():  # fmt: skip
        assert len({getattr(layout, name) for layout in layouts}) >= least, name


def test_places_of_experts_are_drawn() -> None:
    layouts = _drawn(_question(model=SPARSE), 500)
    assert {layout.ep for layout in layouts} == {1, 2, 4, 8}
    assert {layout.expert_tp for layout in layouts} == {1, 2, 4, 8}
    assert {layout.overlap_ep for layout in layouts} == {False, True}


def test_every_split_of_the_gpus_is_as_likely_whatever_else_it_leaves_open() -> None:
    question, times = _question(), 4000
    splits = {(core.tp, core.cp, core.pp, core.dp) for core in DegreeSplits(question).list_splits()}
    drawn = LayoutSampler(question, random.Random(3))
    counts = Counter(
        (layout.tp, layout.cp, layout.pp, layout.dp)
        for layout in (drawn.sample_layout() for _ in range(times))
        if layout is not None
    )
    assert set(counts) == splits
    expected = times / len(splits)
    # Five standard deviations of a count.
    assert all(abs(count - expected) < 5 * expected**0.5 for count in counts.values())


def test_choices_of_one_split_are_as_likely_as_each_other() -> None:
    fixed = ALIKE | {"tp": (1,), "cp": (1,), "pp": (1,), "recompute": ("none",), "shard": (None,)}
    layouts = _drawn(_question(fixed), 1600)
    counts = Counter((layout.microbatch, layout.zero) for layout in layouts)
    assert set(counts) == {(micro, zero) for micro in (1, 2) for zero in (0, 1, 2, 3)}
    assert all(abs(count - 200) < 5 * 200**0.5 for count in counts.values())


@pytest.mark.parametrize("model", [DENSE, SPARSE], ids=lambda model: model.name)
def test_draws_are_as_fast_as_the_fastest_of_all_layouts(model: Model) -> None:
    fixed = ALIKE | {
        "cp": (1,), "recompute": ("none",), "zero": (0, 1), "shard": (None,), "microbatch": (1, 2),
        "schedule": ("1f1b", "interleaved"),
    }  # fmt: skip
    question = _question(fixed, model=model)
    (fastest,) = Every(question).fastest()
    found = sample_layouts(question, feasible=1500, tries=2000).fastest
    assert found[0].step.step_s == pytest.approx(fastest.step.step_s, rel=1e-12)


def test_no_draw_beats_a_proved_plan() -> None:
    question = _question(ALIKE)
    answer = find_plans(question, most=1, execute=False)
    assert answer.is_proved
    assert (
        sample_layouts(question, feasible=200, tries=600).count_faster(answer.best.step.step_s) == 0
    )


def test_the_same_seed_draws_the_same_layouts() -> None:
    question = _question()
    one, two, other = (
        sample_layouts(question, feasible=10, tries=100, seed=seed) for seed in (5, 5, 6)
    )
    assert one == two
    assert one != other


def test_a_space_without_layouts_gives_an_empty_sample() -> None:
    drawn = sample_layouts(_question({"tp": (7,)}), feasible=10, tries=100)
    assert drawn == LayoutSample((), 0)
    assert drawn.estimate_rank(1.0)[:3] == (0.0, 0.0, 1.0)


def test_what_does_not_fit_is_thrown_away_but_counted() -> None:
    model = catalog.get_model("llama3.1-70b")
    fixed: Fixed = {"tp": (1,), "pp": (1,), "cp": (1,), "offload": ((),)}
    question = _question(fixed, model=model)
    drawn = sample_layouts(question, feasible=10, tries=50)
    assert (drawn.fastest, drawn.tried) == ((), 50)


def test_an_unsound_layout_is_not_feasible() -> None:
    assert is_feasible(_question(), Layout(dp=8))
    assert not is_feasible(_question(), Layout(dp=8, microbatch=3))


def test_rank_is_the_share_of_layouts_that_are_faster() -> None:
    drawn = sample_layouts(_question(), feasible=40, tries=400)
    steps = [one.step.step_s for one in drawn.fastest]
    assert steps == sorted(steps)
    assert drawn.estimate_rank(0.0).share == 0
    assert drawn.estimate_rank(2 * steps[-1]).share == 1
    assert drawn.estimate_rank(steps[0]).share == 0
    assert drawn.estimate_rank(steps[20]).share == sum(step < steps[20] for step in steps) / 40


@pytest.mark.parametrize(
    ("hits", "draws", "low", "high"),
    # R. G. Newcombe, Statistics in Medicine 17 (1998), p. 857: table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611),
     (1, 29, 0.0061, 0.1718)],
)  # fmt: skip
def test_intervals_are_wilsons(hits: int, draws: int, low: float, high: float) -> None:
    found = wilson_interval(hits, draws)
    assert found[1:3] == pytest.approx((low, high), abs=5e-5)
    assert (found.share, found.draws) == (hits / draws, draws)
