"""Trying everything goes through each layout once, and scores it as a single prediction does."""

from itertools import chain, islice
from random import Random

import pytest
from msgspec.structs import replace

from meshwright.predict.memory import predict_memory
from meshwright.predict.plan import Question, Space, find_plans, read_fixed
from meshwright.predict.plan.everything import Everything, Scored, try_everything
from meshwright.predict.plan.flows import Flow, pipelines
from meshwright.predict.plan.size import space_size
from meshwright.predict.stage_time import chunk_times
from meshwright.predict.step import predict_step
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.model import gpt
from meshwright.spec.workload import Training
from tests.predict.plan.exhaustive import Every
from tests.predict.plan.small import question_of
from tests.predict.plan.tiny import SPARSE, asked

WIDE = gpt("wide", layers=24, hidden=12288, heads=96, vocab=51200, max_positions=2048)


def many_stages(*fixed: str) -> Question:
    """Return a question of long pipelines, of which many are worked out side by side."""
    return Question(
        model=WIDE,
        cluster=catalog.cluster("dgx-a100-80g").with_gpus(256),
        workload=Training(tokens=10**9, sequence_length=2048, global_batch=512),
        space=Space(base=Layout(precision="fp16"), fixed={**read_fixed(fixed), "shard": (None,)}),
    )


DENSE = (
    "cp=1", "pp=4,8", "tp=4,8", "schedule=1f1b,interleaved", "zero=0,1", "offload=none",
    "recompute_ops=core_attn", "recompute_layers=2", "order=tp-cp-ep-dp-pp,tp-cp-ep-pp-dp",
)  # fmt: skip

PLAIN = (
    "tp=2", "cp=1", "zero=0,1", "offload=none", "schedule=1f1b,interleaved",
    "recompute_ops=core_attn,layernorm",
)  # fmt: skip


def scores(question: Question) -> dict[Layout, float]:
    """Return every layout with its step; each may come but once."""
    found: dict[Layout, float] = {}
    for one in Everything(question):
        assert one.layout not in found
        found[one.layout] = one.step_s
    return found


def assert_as_predicted(question: Question, some: list[Scored]) -> None:
    for one in some:
        run = question.run(one.layout)
        assert one.fits == predict_memory(run).fits
        if one.fits:
            assert one.step_s == pytest.approx(predict_step(run).step_s, rel=1e-9)


def drawn(question: Question, seed: int, most: int) -> list[Scored]:
    """Return some layouts that fit and some that do not."""
    every = list(Everything(question))
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
    best = try_everything(question).best
    assert ([] if best is None else [best.step_s]) == pytest.approx(wanted, rel=1e-9)


def test_the_proved_plan_is_the_fastest_of_everything() -> None:
    question = asked(8, memory_gb=4, fixed=(*PLAIN, "pp=2,4", "microbatch=1,2"))
    tally = try_everything(question)
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
    every = list(Everything(question))
    assert {one.sharing.offload for one in every} == {("optimizer",), ("activations", "optimizer")}
    assert_as_predicted(question, every[:: max(1, len(every) // 40)])


@pytest.mark.parametrize("seed", range(40, 52))
def test_as_many_are_tried_as_the_space_holds(seed: int) -> None:
    question = question_of(Random(seed), 400)
    assert try_everything(question).tried == space_size(question)


def test_what_does_not_fit_counts_as_tried() -> None:
    fixed = ("tp=1", "cp=1", "pp=1", "microbatch=8", "zero=0,1", "offload=none", "recompute=none")
    wide = asked(8, fixed=fixed)
    tight = asked(8, fixed=fixed, memory_gb=2)
    assert try_everything(tight).tried == try_everything(wide).tried
    assert try_everything(tight)[1:3] == (0, None)


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
                run = question.run(replace(layout, recompute=kind))
                flows.append(Flow(run, chunk_times(run)))
    alone = [flow.alone() for flow in flows]
    for one, other in zip(pipelines(flows), alone, strict=True):
        assert one[:4] == pytest.approx(other[:4], rel=1e-12)
        both = zip(chain(*one.edges), chain(*other.edges), strict=True)
        assert all(own == pytest.approx(edge, rel=1e-9, abs=1e-12) for own, edge in both)
