"""Bounds are below every layout they stand for, and what is left out is never better."""

from itertools import islice
from random import Random

import pytest
from msgspec.structs import replace

from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.plan.question.layout_space import LayoutSpace, parse_fixed_fields
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.search.branch_and_bound import (
    ExpertSplitNode,
    Node,
    PlanSearch,
    ScheduleNode,
)
from meshwright.predict.plan.search.degree_nodes import DegreeNode
from meshwright.predict.plan.search.layout_nodes import LayoutNode
from meshwright.predict.plan.space.degree_splits import DegreeSplit, ExpertParallelSplit
from meshwright.predict.step.step_prediction import predict_step
from meshwright.predict.validation.plans.layout_sample import LayoutSampler, is_feasible
from meshwright.spec import catalog
from meshwright.spec.layout import Layout
from meshwright.spec.workload import TrainingWorkload
from tests.predict.plan.exhaustive import Every
from tests.predict.plan.small import question_of

CLOSE = 1 + 1e-9


class Way(PlanSearch):
    """The nodes of the search tree that stand for one layout, level by level."""

    def __init__(self, question: PlanQuestion, layout: Layout) -> None:
        super().__init__(question)
        self.layout = layout
        core = DegreeSplit(
            layout.tp, layout.cp, layout.pp, layout.dp, layout.microbatch, layout.precision
        )
        assert core in set(self.degree_splits.list_splits())
        self.levels: list[list[tuple[float, Node]]] = [[(self.bounds.kernels_bound_s(core), core)]]
        """Cores, splits, meshes, frames, shapes with a schedule, leaves: each with its bound."""
        for _ in range(5):
            self.levels.append([one for _, node in self.levels[-1] for one in self._below(node)])

    def _below(self, node: Node) -> list[tuple[float, Node]]:
        self._heap = []
        self._open(node)
        return [(bound_s, below) for bound_s, _, below in self._heap if self._stands_for_it(below)]

    def _stands_for_it(self, node: Node) -> bool:
        layout = self.layout
        match node:
            case ExpertSplitNode(_, spread):
                return spread == (layout.ep, layout.expert_tp)
            case DegreeNode():
                some = {shape.layout.cp_kind for shape in node.shapes}
                split = node.lower_bound_shape.layout.sequence_parallel
                return split == layout.sequence_parallel and layout.cp_kind in some
            case ScheduleNode(shape, staged):
                layers = layout.stage_layers or (self.question.model.layers,)
                wanted = (layout.schedule, layout.virtual_stages, layers)
                return (
                    shape.layout.cp_kind == layout.cp_kind and staged.schedule_option[:3] == wanted
                )
        return True

    def whole_layouts(self) -> list[LayoutNode]:
        """Return the whole layouts below."""
        return [node for _, node in self.levels[-1] if isinstance(node, LayoutNode)]


def some_layouts(seed: int, most: int = 4) -> tuple[PlanQuestion, list[Layout]]:
    """Return a question, and some of its layouts that are sound and fit."""
    random = Random(seed)
    question = question_of(random, 400)
    every = Every(question)
    sound = [one for one in islice(every.layouts(), 2000) if every.sound(one)]
    random.shuffle(sound)
    fitting = (one for one in sound if predict_memory(question.build_run(one)).fits)
    return question, list(islice(fitting, most))


@pytest.mark.parametrize("seed", range(4))
def test_no_bound_on_the_way_to_a_layout_is_above_its_step(seed: int) -> None:
    question, layouts = some_layouts(seed)
    for layout in layouts:
        step_s = predict_step(question.build_run(layout)).step_s * CLOSE
        for level in Way(question, layout).levels:
            assert min(bound_s for bound_s, _ in level) <= step_s


@pytest.mark.parametrize("seed", range(4))
def test_some_leaf_is_no_slower_than_any_layout_it_stands_for(seed: int) -> None:
    question, layouts = some_layouts(seed, most=2)
    for layout in layouts:
        step_s = predict_step(question.build_run(layout)).step_s * CLOSE
        leaves = Way(question, layout).whole_layouts()
        assert (
            min(predict_step(question.build_run(leaf.layout)).step_s for leaf in leaves) <= step_s
        )


@pytest.mark.parametrize("seed", range(4))
def test_leaves_fit_and_take_no_less_than_their_bounds(seed: int) -> None:
    question, layouts = some_layouts(seed, most=1)
    for layout in layouts:
        for leaf in Way(question, layout).whole_layouts():
            run = question.build_run(leaf.layout)
            assert leaf.bound_s <= predict_step(run).step_s * CLOSE
            assert predict_memory(run).fits
            assert not leaf.layout.check(question.model, question.usable_cluster, question.workload)


LARGE = PlanQuestion(
    model=catalog.get_model("deepseek-v3"),
    cluster=catalog.get_cluster("h100-superpod").with_gpus(2048),
    workload=TrainingWorkload(tokens=10**12, sequence_length=4096, global_batch=15360),
    space=LayoutSpace(
        fixed=parse_fixed_fields(
            ["tp=1,2,4", "pp=8,16", "microbatch=1", "ep=8,16", "zero=1,2,3", "recompute=selective"]
        )
    ),
)


@pytest.mark.parametrize("seed", range(3))
def test_no_bound_of_a_large_question_is_above_a_layout_drawn_from_it(seed: int) -> None:
    draws, search = LayoutSampler(LARGE, Random(seed)), PlanSearch(LARGE)
    drawn = (
        layout for layout in (draws.sample_layout() for _ in range(2000)) if layout is not None
    )
    for layout in islice((one for one in drawn if is_feasible(LARGE, one)), 4):
        step_s = predict_step(LARGE.build_run(layout)).step_s * CLOSE
        core = DegreeSplit(
            layout.tp, layout.cp, layout.pp, layout.dp, layout.microbatch, layout.precision
        )
        spread = ExpertParallelSplit(layout.ep, layout.expert_tp)
        assert search.bounds.kernels_bound_s(core) <= step_s
        assert search.bounds.split_bound_s(core, float("inf")) <= step_s
        assert dict(search.bounds.mesh_bound_s(core, float("inf")))[spread] <= step_s
        frames = list(search.frames.expand(core, spread, float("inf")))
        assert min(frame.bound_s for frame in frames) <= step_s


def least_below(search: PlanSearch, bound_s: float, node: Node) -> float:
    """Return the fastest layout below a node, having checked that no bound is above it."""
    if isinstance(node, LayoutNode):
        run = search.question.build_run(node.layout)
        least = predict_step(run).step_s if predict_memory(run).fits else float("inf")
    else:
        search._heap, search._opened_s = [], 0.0
        search._open(node)
        below = [(bound, child) for bound, _, child in search._heap]
        least = min([least_below(search, *one) for one in below], default=float("inf"))
    assert bound_s <= least * CLOSE, node
    return least


def apart(schedule: str, zero: int, model: str) -> PlanQuestion:
    """Return a question about one schedule, with memory for all of it."""
    cluster = catalog.get_cluster("aws-p4d").with_gpus(64)
    gpu = replace(cluster.gpu, memory_bytes=10**12)
    fixed = [
        f"schedule={schedule}", f"zero={zero}", "tp=1", "cp=1", "pp=2,4", "ep=8,16",
        "expert_tp=1,2", "microbatch=1", "shard=none", "recompute=none",
        "stage_layers=none", "overlap_ep=off,on",
        "order=tp-cp-ep-dp-pp,ep-tp-cp-dp-pp", "overlap_gradients=on", "overlap_parameters=on",
        "overlap_pp=on",
    ]  # fmt: skip
    return PlanQuestion(
        model=catalog.get_model(model),
        cluster=replace(cluster, gpu=gpu),
        workload=TrainingWorkload(tokens=10**12, sequence_length=2048, global_batch=128),
        space=LayoutSpace(fixed=parse_fixed_fields(fixed)),
    )


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "nemotron-3-nano-30b-a3b"])
@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipe-v", "zb-v"])
def test_no_node_is_bounded_above_what_lies_below_it(schedule: str, zero: int, model: str) -> None:
    search = PlanSearch(apart(schedule, zero, model))
    found = [
        least_below(search, search.bounds.kernels_bound_s(core), core)
        for core in search.degree_splits.list_splits()
    ]
    assert min(found) < float("inf")


def test_all_passes_of_a_rank_hide_the_exchange_of_its_experts() -> None:
    fixed = [
        "pp=4", "ep=16", "expert_tp=1", "tp=1", "cp=1", "schedule=dualpipe", "overlap_ep=off",
        "zero=1", "shard=none", "recompute=none,full", "order=tp-cp-ep-dp-pp", "microbatch=1,2,4",
        "overlap_gradients=on", "overlap_parameters=on", "overlap_pp=on",
    ]  # fmt: skip
    question = PlanQuestion(
        model=catalog.get_model("nemotron-3-nano-30b-a3b"),
        cluster=catalog.get_cluster("dgx-a100-80g").with_gpus(64),
        workload=TrainingWorkload(tokens=10**12, sequence_length=4096, global_batch=8192),
        space=LayoutSpace(fixed=parse_fixed_fields(fixed)),
    )
    search = PlanSearch(question)
    found = [
        least_below(search, search.bounds.kernels_bound_s(core), core)
        for core in search.degree_splits.list_splits()
    ]
    assert min(found) < float("inf")
