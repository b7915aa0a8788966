"""Where nothing fits, the error says why, by how much, and what was tried and would help."""

import re

import pytest
from msgspec.structs import replace

from meshwright.errors import InputError, Problem
from meshwright.predict.plan import PlanQuestion, find_plans, parse_fixed_fields
from meshwright.predict.plan.answer.infeasibility import explain_infeasible
from meshwright.predict.plan.answer.nearest_layout import find_nearest_layout
from tests.predict.plan.tiny import SPARSE, asked


def told(question: PlanQuestion) -> tuple[Problem, ...]:
    """Return what a search says of a question that has no answer."""
    with pytest.raises(InputError) as caught:
        find_plans(question, execute=False)
    return caught.value.problems


def about(problems: tuple[Problem, ...], where: str) -> Problem:
    return next(problem for problem in problems if problem.where == where)


def mended(question: PlanQuestion, problem: Problem) -> PlanQuestion:
    """Return the question with the fix of a problem."""
    (name, value), *rest = re.findall(r"(\w+)=([\w,.+-]+)", problem.fix)
    assert not rest
    space = question.space
    if name == "max_memory":
        return replace(question, space=replace(space, max_memory=float(value)))
    if name == "gpus":
        return replace(question, cluster=question.cluster.with_gpus(int(value)))
    if name in ("global_batch", "sequence_length"):
        return replace(question, workload=replace(question.workload, **{name: int(value)}))
    fixed = parse_fixed_fields([f"{name}={value.replace(',', '+')}"])
    return replace(question, space=replace(space, fixed={**space.fixed, **fixed}))


TIGHT = asked(memory_gb=3.5, fixed=("tp=1", "cp=1", "pp=1", "zero=1", "recompute=none"))


def test_the_cause_comes_first_with_the_nearest_layout_and_what_it_lacks() -> None:
    cause = told(TIGHT)[0]
    assert cause.where == "memory"
    found = re.search(r"needs ([\d.]+) GiB of ([\d.]+) GiB, ([\d.]+) (.iB) too much", cause.what)
    assert found is not None
    assert "the nearest, dp=8 zero=1, needs" in cause.what
    missing = float(found[3]) / (1024 if found[4] == "MiB" else 1)
    assert float(found[1]) - float(found[2]) == pytest.approx(missing, abs=0.02)


def test_no_more_than_five_things_are_said() -> None:
    assert 2 < len(told(TIGHT)) <= 5


def test_the_cause_names_what_to_try() -> None:
    cause, *helps = told(TIGHT)
    changes = [problem.fix.removeprefix("use ") for problem in helps[:3]]
    assert cause.fix == f"try {' or '.join(changes)}"


@pytest.mark.parametrize(
    "question",
    [
        TIGHT,
        asked(memory_gb=2.3, fixed=()),
        asked(fixed=("tp=3",)),
        asked(fixed=("tp=2", "cp=1", "pp=2", "dp=8")),
        asked(24, fixed=("tp=2", "cp=1", "pp=4")),
        asked(batch=8, fixed=("pp=4", "tp=1", "cp=1", "schedule=dualpipe")),
        asked(model=SPARSE, memory_gb=2.8, fixed=("ep=1", "tp=1", "zero=1")),
    ],
    ids=["memory", "gpus", "tp", "dp", "batch", "schedule", "experts"],
)
def test_every_fix_makes_the_question_answerable(question: PlanQuestion) -> None:
    _, *helps = told(question)
    assert helps
    for problem in helps:
        if problem.where != "offload":
            assert find_plans(mended(question, problem), most=1, execute=False).plans


def test_what_is_to_go_to_the_host_makes_a_layout_fit() -> None:
    question = asked(memory_gb=2.3, fixed=())
    found = find_nearest_layout(mended(question, about(told(question), "offload")), tries=300)
    assert found is not None
    assert found.fits
    assert found.layout.offload


def test_a_limit_on_memory_is_raised_to_what_the_nearest_needs() -> None:
    free = asked(fixed=("tp=1", "pp=1"))
    question = replace(free, space=replace(free.space, max_memory=0.02))
    problem = about(told(question), "max_memory")
    share = float(problem.fix.removeprefix("use max_memory="))
    assert find_plans(mended(question, problem), most=1, execute=False).plans
    less = replace(question, space=replace(question.space, max_memory=share - 0.01))
    assert told(less)[0].where == "memory"


def test_the_value_named_is_the_nearest_that_fits() -> None:
    rest = ("pp=1", "cp=1", "zero=0", "recompute=full")
    problem = about(told(asked(memory_gb=3.5, fixed=("tp=1", *rest))), "tp")
    assert problem.fix == "use tp=4"
    assert told(asked(memory_gb=3.5, fixed=("tp=2", *rest)))[0].where == "memory"


def test_where_no_single_field_is_the_cause_several_are_opened() -> None:
    degrees = ("tp=1", "cp=1", "pp=1", "dp=8", "zero=0", "recompute=none")
    problem = told(asked(memory_gb=2.4, fixed=degrees))[1]
    assert "no single one of" in problem.what
    assert "tp" in problem.where.split(", ")


def test_groups_that_may_not_leave_a_node_are_let_out() -> None:
    question = asked(16, fixed=("cp=16",))
    inside = replace(question, space=replace(question.space, fit_scale_up_domain=True))
    cause, *helps = told(inside)
    assert cause.where == "fit_scale_up_domain"
    assert about(tuple(helps), "fit_scale_up_domain").fix == "leave fit_scale_up_domain out"


def test_no_cause_is_made_up_where_a_layout_fits_after_all() -> None:
    (problem,) = explain_infeasible(asked()).problems
    assert "is predicted to fit" in problem.what
