"""Trying everything goes through each layout once, and scores it as a single prediction does."""

from itertools import chain, islice
from random import Random

import pytest
from msgspec.structs import replace

from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.plan import LayoutSpace, PlanQuestion, find_plans, parse_fixed_fields
from meshwright.predict.step.stage_time import chunk_times
from meshwright.predict.step.step_prediction import predict_step
from meshwright.predict.validation.plans.batched_bubble import BubbleInput, predict_bubbles
from meshwright.predict.validation.plans.exhaustive_search import (
    ExhaustiveSearch,
    ScoredLayout,
    search_exhaustively,
)
from meshwright.predict.validation.plans.space_size import count_layouts
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.model import build_gpt
from meshwright.spec.workload import TrainingWorkload
from tests.predict.plan.exhaustive import Every
from tests.predict.plan.small import question_of
from tests.predict.plan.tiny import SPARSE, asked

WIDE = build_gpt("wide", layers=24, hidden=12288, heads=96, vocab=51200, max_positions=2048)


def many_stages(*fixed: str) -> PlanQuestion:
    """Return a question of long pipelines, of which many are worked out side by side."""
    return PlanQuestion(
        model=WIDE,
        cluster=catalog.get_cluster("dgx-a100-80g").with_gpus(256),
        workload=TrainingWorkload(tokens=10**9, sequence_length=2048, global_batch=512),
        space=LayoutSpace(
            base=Layout(precision="fp16"), fixed={**parse_fixed_fields(fixed), "shard": (None,)}
        ),
    )


DENSE = (
    "cp=1", "pp=4,8", "tp=4,8", "schedule=1f1b,interleaved", "zero=0,1", "offload=none",
    "recompute_ops=core_attn", "recompute_layers=2", "order=tp-cp-ep-dp-pp,tp-cp-ep-pp-dp",
)  # fmt: skip

PLAIN = (
    "tp=2", "cp=1", "zero=0,1", "offload=none", "schedule=1f1b,interleaved",
    "recompute_ops=core_attn,layernorm",
)  # fmt: skip


def scores(question: PlanQuestion) -> dict[Layout, float]:
    """Return every layout with its step; each may come but once."""
    found: dict[Layout, float] = {}
    for one in ExhaustiveSearch(question):
        assert one.layout not in found
        found[one.layout] = one.step_s
    return found


def assert_as_predicted(question: PlanQuestion, some: list[ScoredLayout]) -> None:
    for one in some:
        run = question.build_run(one.layout)
        assert one.fits == predict_memory(run).fits
        if one.fits:
            assert one.step_s == pytest.approx(predict_step(run).step_s, rel=1e-9)


def drawn(question: PlanQuestion, seed: int, most: int) -> list[ScoredLayout]:
    """Return some layouts that fit and some that do not."""
    every = list(ExhaustiveSearch(question))
    chance = Random(seed)
    chance.shuffle(every)
    every.sort(key=lambda one: one.fits)
    return every[: most // 2] + every[-most:]


@pytest.mark.parametrize("seed", range(12))
def test_every_layout_is_scored_as_it_is_predicted_alone(seed: int) -> None:
    question = question_of(Random(seed), 400)
    assert_as_predicted(question, drawn(question, seed, 60))


def test_long_pipelines_are_scored_as_they_are_predicted_alone() -> None:
    question = many_stages(*DENSE)
    some = drawn(question, 0, 120)
    assert {one.layout.schedule for one in some if one.fits} == {"1f1b", "interleaved"}
    assert {one.layout.zero for one in some if one.fits} == {0, 1}
    assert {one.overlap_pp for one in some if one.fits} == {False, True}
    assert_as_predicted(question, some)


@pytest.mark.parametrize("seed", range(20, 32))
def test_the_fastest_is_that_of_the_plain_enumeration(seed: int) -> None:
    question = question_of(Random(seed), 400)
    wanted = [one.step.step_s for one in Every(question).fastest()]
    best = search_exhaustively(question).best
    assert ([] if best is None else [best.step_s]) == pytest.approx(wanted, rel=1e-9)


def test_the_proved_plan_is_the_fastest_of_everything() -> None:
    question = asked(8, memory_gb=4, fixed=(*PLAIN, "pp=2,4", "microbatch=1,2"))
    tally = search_exhaustively(question)
    assert tally.best is not None
    answer = find_plans(question, most=1, execute=False)
    assert answer.best.step.step_s == pytest.approx(tally.best.step_s, rel=1e-9)


def test_each_layout_comes_once_and_is_sound() -> None:
    question = asked(8, fixed=(*PLAIN, "microbatch=1", "recompute_layers=1"))
    found = scores(question)
    every = Every(question)
    assert found
    assert all(every.sound(layout) for layout in islice(found, 0, None, 7))


def test_experts_are_scored_as_they_are_predicted_alone() -> None:
    fixed = (
        "tp=2", "cp=1", "microbatch=1", "zero=1,3", "offload=none", "recompute=none,full",
        "schedule=1f1b,dualpipe-v", "order=tp-cp-ep-dp-pp", "expert_tp=1", "shard=2",
    )  # fmt: skip
    question = asked(8, model=SPARSE, fixed=fixed)
    assert_as_predicted(question, drawn(question, 0, 60))


def test_what_goes_to_the_host_is_scored_too() -> None:
    fixed = ("tp=2", "cp=1", "pp=2", "microbatch=1", "schedule=1f1b", "recompute=none", "zero=0",
             "offload=optimizer,activations+optimizer")  # fmt: skip
    question = asked(8, fixed=fixed)
    every = list(ExhaustiveSearch(question))
    assert {one.sharding.offload for one in every} == {("optimizer",), ("activations", "optimizer")}
    assert_as_predicted(question, every[:: max(1, len(every) // 40)])


@pytest.mark.parametrize("seed", range(40, 52))
def test_as_many_are_tried_as_the_space_holds(seed: int) -> None:
    question = question_of(Random(seed), 400)
    assert search_exhaustively(question).tried == count_layouts(question)


def test_what_does_not_fit_counts_as_tried() -> None:
    fixed = ("tp=1", "cp=1", "pp=1", "microbatch=8", "zero=0,1", "offload=none", "recompute=none")
    wide = asked(8, fixed=fixed)
    tight = asked(8, fixed=fixed, memory_gb=2)
    assert search_exhaustively(tight).tried == search_exhaustively(wide).tried
    assert search_exhaustively(tight)[1:3] == (0, None)


def test_side_by_side_pipelines_are_those_worked_out_alone() -> None:
    question = many_stages(*DENSE)
    flows = []
    for chunks, micro, overlap in ((1, 1, True), (1, 2, False), (3, 1, True), (3, 2, False)):
        for tp, pp in ((4, 8), (8, 8)):
            layout = Layout(
                tp=tp, pp=pp, dp=256 // (tp * pp), virtual_stages=chunks, microbatch=micro,
                schedule="interleaved" if chunks > 1 else "1f1b", overlap_pp=overlap,
            )  # fmt: skip
            for kind in ("none", "full"):
                run = question.build_run(replace(layout, recompute=kind))
                flows.append(BubbleInput(run, chunk_times(run)))
    alone = [flow.predict_one() for flow in flows]
    for one, other in zip(predict_bubbles(flows), alone, strict=True):
        assert one[:4] == pytest.approx(other[:4], rel=1e-12)
        both = zip(chain(*one.chunk_edges), chain(*other.chunk_edges), strict=True)
        assert all(own == pytest.approx(edge, rel=1e-9, abs=1e-12) for own, edge in both)
