"""Bounds are below every layout they stand for, and what is left out is never better."""

from itertools import islice
from random import Random

import pytest

from meshwright.predict.memory import predict_memory
from meshwright.predict.plan.frames import Frame, Staged
from meshwright.predict.plan.leaves import Leaf
from meshwright.predict.plan.meshes import Core, Spread
from meshwright.predict.plan.question import Question
from meshwright.predict.plan.search import Search
from meshwright.predict.plan.shapes import Shape
from meshwright.predict.step import predict_step
from meshwright.spec.layout import Layout
from tests.predict.plan.exhaustive import Every
from tests.predict.plan.small import question_of

CLOSE = 1 + 1e-9
NO_LIMIT = float("inf")


class Way:
    """The nodes of the search tree that stand for one layout."""

    def __init__(self, question: Question, layout: Layout) -> None:
        self.search, self.layout = Search(question), layout
        self.core = Core(
            layout.tp, layout.cp, layout.pp, layout.dp, layout.microbatch, layout.precision
        )
        self.spread = Spread(layout.ep, layout.expert_tp)
        self.frame = self._frame()
        self.shapes = [
            shape for shape in self.frame.shapes if shape.layout.cp_kind == layout.cp_kind
        ]
        self.search.frames.stage(self.frame, NO_LIMIT)
        self.staged = self._staged()

    def _frame(self) -> Frame:
        gathers = self.layout.cp_kind == "allgather"
        for frame in self.search.frames.of(self.core, self.spread, NO_LIMIT):
            shape = frame.shape.layout
            if shape.sequence_parallel != self.layout.sequence_parallel:
                continue
            if self.layout.cp == 1 or gathers == (shape.cp_kind == "allgather"):
                return frame
        raise AssertionError("no frame stands for the layout")

    def _staged(self) -> list[Staged]:
        layout = self.layout
        split = layout.stage_layers or (sum(self.frame.staged[0].pipe.split),)
        wanted = (layout.schedule, layout.virtual_stages, split)
        return [staged for staged in self.frame.staged if staged.pipe[:3] == wanted]

    def opened(self) -> list[tuple[Shape, Staged]]:
        """Return its shapes with its schedule."""
        return [(shape, staged) for shape in self.shapes for staged in self.staged]

    def leaves(self) -> list[Leaf]:
        """Return the whole layouts below them."""
        leaves, opened = self.search.leaves, self.opened()
        return [leaf for one in opened for leaf in leaves.of(*one, NO_LIMIT)]


def some_layouts(seed: int, most: int = 4) -> tuple[Question, list[Layout]]:
    """Return a question, and some of its layouts that are sound and fit."""
    random = Random(seed)
    question = question_of(random, 400)
    every = Every(question)
    sound = [one for one in islice(every.layouts(), 2000) if every.sound(one)]
    random.shuffle(sound)
    fitting = (one for one in sound if predict_memory(question.run(one)).fits)
    return question, list(islice(fitting, most))


@pytest.mark.parametrize("seed", range(30))
def test_no_bound_on_the_way_to_a_layout_is_above_its_step(seed: int) -> None:
    question, layouts = some_layouts(seed)
    for layout in layouts:
        step_s = predict_step(question.run(layout)).step_s * CLOSE
        way = Way(question, layout)
        bounds = way.search.bounds
        assert way.core in set(way.search.meshes.cores())
        assert way.spread in way.search.meshes.spreads(way.core)
        assert bounds.kernels_s(way.core) <= step_s
        assert bounds.core_s(way.core, NO_LIMIT) <= step_s
        assert bounds.mesh_s(way.core, way.spread) <= step_s
        assert way.frame.shape.least_s() <= step_s
        assert min(shape.least_s() for shape in way.shapes) <= step_s
        frames = way.search.frames
        assert min(frames.least_s(*one, NO_LIMIT) for one in way.opened()) <= step_s
        assert min(leaf.bound_s for leaf in way.leaves()) <= step_s


@pytest.mark.parametrize("seed", range(30))
def test_some_leaf_is_no_slower_than_any_layout_it_stands_for(seed: int) -> None:
    question, layouts = some_layouts(seed, most=2)
    for layout in layouts:
        step_s = predict_step(question.run(layout)).step_s * CLOSE
        leaves = Way(question, layout).leaves()
        assert min(predict_step(question.run(leaf.layout)).step_s for leaf in leaves) <= step_s


@pytest.mark.parametrize("seed", range(30))
def test_leaves_fit_and_take_no_less_than_their_bounds(seed: int) -> None:
    question, layouts = some_layouts(seed, most=1)
    for layout in layouts:
        for leaf in Way(question, layout).leaves():
            run = question.run(leaf.layout)
            assert leaf.bound_s <= predict_step(run).step_s * CLOSE
            assert predict_memory(run).fits
            assert not leaf.layout.check(question.model, question.limited, question.workload)
