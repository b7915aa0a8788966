"""Branch and bound: the fastest layouts of a question, proved.

Nodes are opened in the order of their lower bounds: splits of the GPUs, then frames with their
microbatch, shapes with a schedule, and whole layouts. A node whose bound is no better than what is
known holds nothing better, and neither does any after it: then the answer is proved. A quick search
among usual layouts comes first, so that there is an answer at any time, and a bound on how much
better any other could be.
"""

import heapq
import time
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.plan.bounds.split_bounds import SplitBounds
from meshwright.predict.plan.question.layout_space import FIXED_UNLESS_ALLOWED
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.search.degree_nodes import DegreeNode, DegreeNodes, DegreeSchedule
from meshwright.predict.plan.search.layout_nodes import LayoutNode, LayoutNodes
from meshwright.predict.plan.space.degree_splits import (
    DegreeSplit,
    DegreeSplits,
    ExpertParallelSplit,
)
from meshwright.predict.plan.space.layer_shapes import LayerShape, LayerShapes
from meshwright.predict.plan.space.pipeline_schedules import OVERLAPPED_SCHEDULES, ScheduleOptions
from meshwright.predict.plan.space.zero_groups import list_zero_groups
from meshwright.predict.step.step_prediction import StepPrediction, predict_step
from meshwright.spec.layout import Layout

_REPORT_S = 0.2
"""How often a search says how far it is."""


class PlanCandidate(NamedTuple):
    """A layout that fits, with its prediction."""

    layout: Layout
    step: StepPrediction

    @property
    def layout_family(self) -> tuple[object, ...]:
        """What makes two layouts more than variants of each other."""
        return get_layout_family(self.layout)


def get_layout_family(layout: Layout) -> tuple[object, ...]:
    """Return what variants of a layout have in common."""
    return (
        layout.tp, layout.cp, layout.pp, layout.ep, layout.expert_tp, layout.microbatch,
        layout.schedule, layout.zero == 3, layout.precision,
    )  # fmt: skip


class PlanProgress(NamedTuple):
    """How far a search is."""

    best_step_s: float | None
    """The fastest step found."""
    bound_s: float
    """No layout is faster than this."""
    expanded_nodes: int
    """Nodes looked into."""
    open_nodes: int
    """Nodes still to be looked into."""


Report = Callable[[PlanProgress], None]


class SplitNode(NamedTuple):
    """A split of the GPUs whose memory is known to suffice."""

    split: DegreeSplit


class ExpertSplitNode(NamedTuple):
    """A split of the GPUs with the places of experts."""

    split: DegreeSplit
    expert_split: ExpertParallelSplit


class ScheduleNode(NamedTuple):
    """A shape with a schedule."""

    shape: LayerShape
    frame_schedule: DegreeSchedule


Node = DegreeSplit | SplitNode | ExpertSplitNode | DegreeNode | ScheduleNode | LayoutNode


_WIDER: dict[type, int] = {DegreeSplit: 1024, SplitNode: 16, ExpertSplitNode: 4}
"""How much wider than asked a beam is where bounds say little yet."""


class PlanSearch:
    """One search; it can be stopped at any time and says how far it got."""

    def __init__(
        self, question: PlanQuestion, *, max_plans: int = 1, known: Iterable[PlanCandidate] = ()
    ) -> None:
        self.question, self.max_plans = question, max_plans
        self.degree_splits = DegreeSplits(question)
        self.shapes = LayerShapes(question, self.degree_splits)
        pipes = ScheduleOptions(self.degree_splits, self.shapes.kernel_times)
        self.frames = DegreeNodes(question, self.shapes, pipes)
        self.bounds = SplitBounds(
            question, self.degree_splits, self.shapes, self.frames.schedule_bounds
        )
        self.layout_nodes = LayoutNodes(question, self.frames)
        self.best: list[PlanCandidate] = []
        """The fastest of each family, the fastest first."""
        self.bound_s, self.expanded_nodes, self.evaluated = 0.0, 0, 0
        self._heap: list[tuple[float, int, Node]] = []
        self._count, self._said_s, self._opened_s = count(), 0.0, 0.0
        for candidate in known:
            self._keep(candidate)

    @property
    def cutoff_s(self) -> float:
        """What a layout has to beat."""
        return self.best[-1].step.step_s if len(self.best) >= self.max_plans else float("inf")

    def _to_beat_s(self, layout: Layout) -> float:
        """Return what a layout has to beat: another of its family, where that is among the best."""
        family = get_layout_family(layout)
        rivals = [one.step.step_s for one in self.best if one.layout_family == family]
        return min([self.cutoff_s, *rivals])

    def _any_to_beat_s(self, opened: "ScheduleNode") -> float:
        """Return the same for layouts whose sharing is still open."""
        layout = opened.frame_schedule.schedule_option.apply_to(opened.shape.layout)
        stages = {keeping.max_zero_stage for keeping in list_zero_groups(self.question, layout)}
        return max(self._to_beat_s(replace(layout, zero=zero)) for zero in stages)

    def run(
        self, cores: Iterable[DegreeSplit] | None = None, *, report: Report | None = None
    ) -> bool:
        """Search all splits of the GPUs, or some; return whether the answer is proved."""
        for core in self.degree_splits.list_splits() if cores is None else cores:
            self._push(self.bounds.kernels_bound_s(core), core)
        while self._heap:
            bound_s, _, node = heapq.heappop(self._heap)
            if bound_s >= self.cutoff_s:
                break
            self.bound_s = self._opened_s = bound_s
            if self.best:
                self._open(node)
            else:
                self._dive(node)
            self.expanded_nodes += 1
            self._say(report)
        self.bound_s = self.best[0].step.step_s if self.best else float("inf")
        return True

    def run_beam(self, width: int, *, report: Report | None = None) -> bool:
        """Search level by level, of each only the `width` most promising nodes; return as `run`.

        What is left out may hold something better: `bound_s` says how much at the most.
        """
        left_out = float("inf")
        for core in self.degree_splits.list_splits():
            self._push(self.bounds.kernels_bound_s(core), core)
        while self._heap:
            level, self._heap = sorted(self._heap), []
            most = width * _WIDER.get(type(level[0][2]), 1)
            left_out = min([left_out, *(bound_s for bound_s, _, _ in level[most:])])
            for bound_s, _, node in level[:most]:
                if bound_s < self.cutoff_s:
                    self._opened_s = bound_s
                    self._open(node)
                    self.expanded_nodes += 1
                    self.bound_s = min(left_out, level[0][0])
                    self._say(report)
        best_s = self.best[0].step.step_s if self.best else float("inf")
        self.bound_s = min(left_out, best_s)
        return left_out >= self.cutoff_s

    def _say(self, report: Report | None) -> None:
        if report is not None and time.monotonic() > self._said_s + _REPORT_S:
            self._said_s = time.monotonic()
            report(self.get_progress())

    def get_progress(self) -> PlanProgress:
        """Return how far the search is."""
        best = self.best[0].step.step_s if self.best else None
        return PlanProgress(best, self.bound_s, self.expanded_nodes, len(self._heap))

    def _push(self, bound_s: float, node: Node) -> None:
        # No part of a node is better than the whole of it.
        bound_s = max(bound_s, self._opened_s)
        if bound_s < self.cutoff_s:
            heapq.heappush(self._heap, (bound_s, next(self._count), node))

    def _dive(self, node: Node) -> None:
        """Follow the most promising way down to a first answer."""
        outer, below = self._heap, [(self._opened_s, 0, node)]
        while below:
            self._heap = []
            self._opened_s = below[0][0]
            self._open(below[0][2])
            below = self._heap
            heapq.heapify(below)
            outer.extend(below[1:])
        heapq.heapify(outer)
        self._heap = outer

    def _open(self, node: Node) -> None:
        match node:
            case DegreeSplit():
                self._push(self.bounds.split_bound_s(node, self.cutoff_s), SplitNode(node))
            case SplitNode(core):
                for spread, bound_s in self.bounds.mesh_bound_s(core, self.cutoff_s):
                    self._push(bound_s, ExpertSplitNode(core, spread))
            case ExpertSplitNode(core, spread):
                for frame in self.frames.expand(core, spread, self.cutoff_s):
                    self._push(frame.bound_s, frame)
            case DegreeNode():
                self._stage(node)
            case ScheduleNode(shape, staged):
                for leaf in self.layout_nodes.expand(shape, staged, self._any_to_beat_s(node)):
                    if leaf.bound_s < self._to_beat_s(leaf.layout):
                        self._push(leaf.bound_s, leaf)
            case LayoutNode(bound_s, layout):
                if bound_s < self._to_beat_s(layout):
                    self._evaluate(layout)

    def _stage(self, frame: DegreeNode) -> None:
        if self.frames.build_schedules(frame, self.cutoff_s) >= self.cutoff_s:
            return
        allowed = self.question.space.get_allowed("overlap_ep") or ()
        switched = frame.lower_bound_shape.layout.ep > 1 and True in allowed
        for shape in frame.shapes:
            if shape.bound_s() >= self.cutoff_s:
                continue
            for staged in frame.frame_schedules:
                # Only passes that run side by side may hide more than a switch for it does.
                if (
                    switched
                    and not shape.layout.overlap_ep
                    and staged.schedule_option.schedule not in OVERLAPPED_SCHEDULES
                ):
                    continue
                opened = ScheduleNode(shape, staged)
                limit_s = self._any_to_beat_s(opened)
                bound_s = self.frames.bound_s(shape, staged, limit_s)
                if bound_s < limit_s:
                    self._push(bound_s, opened)

    def _evaluate(self, layout: Layout) -> None:
        run = self.question.build_run(layout)
        step = predict_step(run)
        self.evaluated += 1
        if step.step_s < self.cutoff_s and predict_memory(run).fits:
            self._keep(PlanCandidate(layout, step))

    def _keep(self, candidate: PlanCandidate) -> None:
        """Keep the fastest of each family, and no more families than asked for."""
        rivals = [one for one in self.best if one.layout_family == candidate.layout_family]
        if any(one.step.step_s <= candidate.step.step_s for one in rivals):
            return
        self.best = [one for one in self.best if one not in rivals]
        self.best.append(candidate)
        self.best.sort(key=lambda one: one.step.step_s)
        del self.best[self.max_plans :]


_USUAL: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4, 8),
    "cp": (1, 2, 4, 8, 16),
    "microbatch": (1, 2, 4, 8),
    "expert_tp": (1, 2, 4),
    "order": ("tp-cp-ep-dp-pp", "cp-ep-tp-dp-pp", "tp-ep-cp-dp-pp"),
    "schedule": ("1f1b", "interleaved", "zb-v", "dualpipe", "dualpipe-v"),
    "sequence_parallel": (True,),
    "cp_kind": ("ring",),
    "zero": (1, 3),
    "shard": (None,),
    "overlap_gradients": (True,),
    "overlap_parameters": (True,),
    "overlap_tp": (True,),
    "overlap_pp": (True,),
    "offload": ((),),
    "stage_layers": (None,),
}
"""What most people would try first."""


def restrict_to_common_layouts(question: PlanQuestion) -> PlanQuestion:
    """Return a question with few layouts, to have a good answer soon."""
    space, fixed = question.space, dict(question.space.fixed)
    for name, values in _USUAL.items():
        if name in FIXED_UNLESS_ALLOWED and name in fixed:
            continue  # somebody asked for it
        allowed = space.get_allowed(name)
        both = tuple(value for value in values if allowed is None or value in allowed)
        if both:
            fixed[name] = both
    return replace(question, space=replace(space, fixed=fixed))
