"""How few layers have to be computed again agrees with what memory is predicted, at the edge."""

from random import Random

import pytest

from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.search.branch_and_bound import PlanSearch
from meshwright.predict.plan.search.degree_nodes import DegreeSchedule
from meshwright.predict.plan.space.degree_splits import DegreeSplit
from meshwright.predict.plan.space.layer_shapes import LayerShape
from meshwright.predict.plan.space.recompute_options import RecomputeOption
from meshwright.predict.plan.space.zero_groups import list_zero_groups
from meshwright.spec.layout import Layout
from tests.predict.plan.small import question_of

NO_LIMIT = float("inf")


def some_opened(search: PlanSearch, random: Random) -> list[tuple[LayerShape, DegreeSchedule]]:
    """Return some shapes with schedules, one of each of a few splits of the GPUs."""
    cores: list[DegreeSplit] = list(search.degree_splits.list_splits())
    found = []
    for core in random.sample(cores, min(2, len(cores))):
        spreads = search.degree_splits.list_expert_splits(core)
        if not spreads:
            continue
        for frame in search.frames.expand(core, random.choice(spreads), NO_LIMIT):
            search.frames.build_schedules(frame, NO_LIMIT)
            if frame.frame_schedules:
                found.append((random.choice(frame.shapes), random.choice(frame.frame_schedules)))
    return found


def fits(question: PlanQuestion, layout: Layout, option: RecomputeOption, layers: int) -> bool:
    """Ask the memory prediction itself."""
    return predict_memory(question.build_run(option.choice.apply_to(layout, layers or None))).fits


@pytest.mark.parametrize("seed", range(5))
def test_one_layer_fewer_does_not_fit(seed: int) -> None:
    random = Random(seed)
    question = question_of(random, 400)
    search = PlanSearch(question)
    for shape, staged in some_opened(search, random):
        layout = staged.schedule_option.apply_to(shape.layout)
        for way in search.layout_nodes.sharding_options.list_options(
            layout, shape.orders, staged.stage_contents
        ):
            shared = way.sharding.apply_to(layout)
            keeping = next(
                f for f in list_zero_groups(question, layout) if way.sharding.zero in f.zero_stages
            )
            fewest = staged.find_min_recompute_layers(keeping, way.resident_bytes)
            for option in search.frames.list_recompute_options(shape, keeping):
                layers = fewest[option.option_index]
                if option.choice.recompute == "none":
                    assert fits(question, shared, option, 0) == (layers == 0)
                    continue
                counts = range(1, staged.stage_contents.max_chunk_layers + 1)
                every = [fits(question, shared, option, count) for count in counts]
                assert (layers is None) == (not any(every))
                if layers is not None:
                    assert every.index(True) + 1 == layers
