"""How few layers have to be computed again agrees with what memory is predicted, at the edge."""

from random import Random

import pytest

from meshwright.predict.memory import predict_memory
from meshwright.predict.plan.frames import Staged
from meshwright.predict.plan.keepings import keepings
from meshwright.predict.plan.meshes import Core
from meshwright.predict.plan.question import Question
from meshwright.predict.plan.recomputes import Option
from meshwright.predict.plan.search import Search
from meshwright.predict.plan.shapes import Shape
from meshwright.spec.layout import Layout
from tests.predict.plan.small import question_of

NO_LIMIT = float("inf")


def some_opened(search: Search, random: Random) -> list[tuple[Shape, Staged]]:
    """Return some shapes with schedules, one of each of a few splits of the GPUs."""
    cores: list[Core] = list(search.meshes.cores())
    found = []
    for core in random.sample(cores, min(2, len(cores))):
        spreads = search.meshes.spreads(core)
        if not spreads:
            continue
        for frame in search.frames.of(core, random.choice(spreads), NO_LIMIT):
            search.frames.stage(frame, NO_LIMIT)
            if frame.staged:
                found.append((random.choice(frame.shapes), random.choice(frame.staged)))
    return found


def fits(question: Question, layout: Layout, option: Option, layers: int) -> bool:
    """Ask the memory prediction itself."""
    return predict_memory(question.run(option.again.on(layout, layers or None))).fits


@pytest.mark.parametrize("seed", range(5))
def test_one_layer_fewer_does_not_fit(seed: int) -> None:
    random = Random(seed)
    question = question_of(random, 400)
    search = Search(question)
    for shape, staged in some_opened(search, random):
        layout = staged.pipe.on(shape.layout)
        for way in search.leaves.sharings.of(layout, shape.orders, staged.stages):
            shared = way.sharing.on(layout)
            keeping = next(f for f in keepings(question, layout) if way.sharing.zero in f.stages)
            fewest = staged.fewest(keeping, way.residents)
            for option in search.frames.options(shape, keeping):
                layers = fewest[option.row]
                if option.again.recompute == "none":
                    assert fits(question, shared, option, 0) == (layers == 0)
                    continue
                counts = range(1, staged.stages.deepest + 1)
                every = [fits(question, shared, option, count) for count in counts]
                assert (layers is None) == (not any(every))
                if layers is not None:
                    assert every.index(True) + 1 == layers
