"""The layout closest to fitting is, on small questions, the one that needs least of all."""

from random import Random

import pytest
from msgspec.structs import replace

from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.plan import PlanQuestion
from meshwright.predict.plan.answer.nearest_layout import find_nearest_layout, find_simplest_layout
from tests.predict.plan.exhaustive import Every
from tests.predict.plan.small import question_of
from tests.predict.plan.tiny import asked


def tight(seed: int) -> PlanQuestion:
    """Return a small question whose GPUs hold next to nothing."""
    question = question_of(Random(seed), 500)
    gpu = replace(question.cluster.gpu, memory_bytes=10**6)
    return replace(question, cluster=replace(question.cluster, gpu=gpu))


@pytest.mark.parametrize("seed", range(5))
def test_the_nearest_needs_no_more_than_any_layout(seed: int) -> None:
    question = tight(seed)
    every = Every(question)
    needed = [
        predict_memory(question.build_run(one)).worst_stage.total_bytes
        for one in every.layouts()
        if every.sound(one)
    ]
    found = find_nearest_layout(question, tries=300)
    assert (found is None) == (not needed)
    if found is not None:
        assert every.sound(found.layout)
        # The best few splits are looked at closely, so a near tie may be lost.
        assert min(needed) <= found.needed_bytes <= 1.03 * min(needed)


def test_what_is_said_of_a_layout_is_its_prediction() -> None:
    question = asked(memory_gb=1)
    found = find_nearest_layout(question, tries=50)
    assert found is not None
    memory = predict_memory(question.build_run(found.layout))
    assert (found.needed_bytes, found.stage) == (
        memory.worst_stage.total_bytes,
        memory.worst_stage.stage,
    )
    assert found.missing_bytes == -memory.free_bytes > 0
    assert not found.fits


def test_what_fits_easily_is_found_at_once() -> None:
    found = find_nearest_layout(asked(), tries=1)
    assert found is not None
    assert found.fits


def test_the_plainest_that_fits_splits_and_recomputes_nothing() -> None:
    question = asked()
    found = find_nearest_layout(question, tries=1)
    assert found is not None
    plain = find_simplest_layout(question, found, tries=50).layout
    assert (plain.tp, plain.cp, plain.pp, plain.recompute, plain.offload) == (1, 1, 1, "none", ())


def test_the_plainest_keeps_to_what_is_allowed() -> None:
    question = asked(fixed=("tp=2", "recompute=full", "zero=3", "offload=optimizer"))
    found = find_nearest_layout(question, tries=1)
    assert found is not None
    plain = find_simplest_layout(question, found, tries=50)
    assert plain.fits
    assert (plain.layout.tp, plain.layout.recompute, plain.layout.zero) == (2, "full", 3)
    assert plain.layout.offload == ("optimizer",)


def test_there_is_none_where_no_layout_is_sound() -> None:
    assert find_nearest_layout(asked(fixed=("tp=3",)), tries=50) is None
