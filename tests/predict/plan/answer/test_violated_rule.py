"""Where no layout is sound, the rule that the last candidates break is named with its values."""

from random import Random

import pytest
from msgspec.structs import replace

from meshwright.predict.plan import LayoutSpace, PlanQuestion
from meshwright.predict.plan.answer.violated_rule import find_last_violation
from meshwright.spec.model import Model, build_gpt
from tests.predict.plan.exhaustive import Every
from tests.predict.plan.small import question_of
from tests.predict.plan.tiny import DENSE, SPARSE, asked


def refused(*fixed: str, model: Model = DENSE, gpus: int = 8, batch: int = 64) -> tuple[str, str]:
    """Return where the last candidates are refused, and why."""
    problem = find_last_violation(asked(gpus, model=model, batch=batch, fixed=fixed))
    assert problem is not None
    assert problem.fix
    return problem.where, problem.what


@pytest.mark.parametrize("seed", range(5))
def test_something_is_refused_exactly_where_no_layout_is_sound(seed: int) -> None:
    question = question_of(Random(seed), 500)
    every = Every(question)
    assert (find_last_violation(question) is None) == any(map(every.sound, every.layouts()))


def test_a_degree_that_does_not_divide_the_gpus() -> None:
    assert refused("tp=3") == ("tp", "3 does not divide the 8 GPUs")


def test_a_degree_that_does_not_divide_the_heads() -> None:
    where, what = refused("tp=16", gpus=16)
    assert where == "tp"
    assert "16 does not divide the 8 attention heads" in what


def test_degrees_that_together_are_more_than_the_gpus() -> None:
    assert refused("tp=4", "pp=4") == ("pp", "tp=4 × pp=4 does not divide the 8 GPUs")


def test_degrees_that_leave_another_number_of_replicas() -> None:
    where, what = refused("tp=2", "cp=1", "pp=2", "dp=8")
    assert (where, what) == ("dp", "tp=2, cp=1, pp=2 leave dp=2 of 8 GPUs, not 8")


def test_more_stages_than_layers() -> None:
    assert refused("pp=8") == ("pp", "8 stages are more than the 4 layers")


def test_a_batch_that_does_not_divide_over_the_replicas() -> None:
    where, what = refused("tp=2", "cp=1", "pp=4", gpus=24)
    assert (where, what) == ("global_batch", "64 sequences do not divide over dp=3 replicas")


def test_a_microbatch_that_does_not_divide_a_replicas_share() -> None:
    where, what = refused("dp=8", "microbatch=3")
    assert (where, what) == ("microbatch", "3 does not divide the 8 sequences of a replica")


def test_a_schedule_with_too_few_microbatches() -> None:
    where, what = refused("pp=4", "dp=2", "schedule=dualpipe", batch=8)
    assert where == "global_batch"
    assert "4 microbatches are too few" in what


def test_chunks_that_have_no_layers() -> None:
    where, what = refused("pp=4", "virtual_stages=2")
    assert (where, what) == (
        "virtual_stages",
        "2 chunks on each of pp=4 ranks are more than the 4 layers",
    )


def test_a_split_of_other_layers() -> None:
    where, _ = refused("pp=4", "virtual_stages=1", "stage_layers=2+2")
    assert where == "stage_layers"


def test_experts_that_do_not_divide() -> None:
    where, what = refused("ep=3", model=SPARSE, gpus=24, batch=72)
    assert (where, what) == ("ep", "3 does not divide the 8 experts")


def test_states_shared_with_nobody() -> None:
    where, _ = refused("tp=8", "zero=1")
    assert where == "zero"


def test_a_format_that_the_gpu_has_not() -> None:
    where, what = refused("precision=mxfp8")
    assert where == "precision"
    assert "has no mxfp8" in what


def test_sequences_longer_than_the_positions() -> None:
    short = build_gpt("short", layers=4, hidden=512, heads=8, vocab=512, max_positions=1024)
    where, what = refused(model=short)
    assert where == "sequence_length"
    assert "1024 learned positions" in what


def test_groups_that_cannot_stay_inside_a_node() -> None:
    question = asked(16, fixed=("cp=16",))
    inside = replace(question.space, fit_scale_up_domain=True)
    problem = find_last_violation(replace(question, space=inside))
    assert problem is not None
    assert problem.where == "fit_scale_up_domain"
    assert "16 does not stay inside the 8 GPUs" in problem.what


def test_an_order_that_puts_experts_in_another_stage() -> None:
    fixed = ("tp=2", "cp=1", "pp=2", "ep=4", "expert_tp=1", "order=tp-pp-cp-ep-dp")
    where, _ = refused(*fixed, model=SPARSE)
    assert where == "order"


def test_nothing_is_refused_for_lack_of_memory() -> None:
    question: PlanQuestion = asked(memory_gb=0.1)
    assert question.space == LayoutSpace()
    assert find_last_violation(question) is None
