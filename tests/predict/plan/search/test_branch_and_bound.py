"""What a search promises: proof, anytime answers, parts that make a whole, and kept constraints."""

from typing import Any

import pytest
from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.network.placement import count_domain_gpus
from meshwright.predict.plan import LayoutSpace, PlanQuestion, find_plans
from meshwright.predict.plan.search.branch_and_bound import (
    PlanProgress,
    PlanSearch,
    restrict_to_common_layouts,
)
from meshwright.spec import catalog
from meshwright.spec.layout.ranks import list_process_groups
from meshwright.spec.workload import TrainingWorkload


def question(
    model: str = "llama3.1-8b", *, gpus: int = 32, **fixed: tuple[Any, ...]
) -> PlanQuestion:
    return PlanQuestion(
        model=catalog.get_model(model),
        cluster=catalog.get_cluster("h100-superpod").with_gpus(gpus),
        workload=TrainingWorkload(tokens=10**9, sequence_length=4096, global_batch=64),
        space=LayoutSpace(fixed=fixed),
    )


SMALL = question(cp=(1,), microbatch=(1, 2))
SPARSE = question("mixtral-8x7b", microbatch=(1,), cp=(1,), zero=(1,), recompute=("none", "full"))


def steps(search: PlanSearch) -> list[float]:
    return [one.step.step_s for one in search.best]


def test_parts_of_the_splits_have_the_answer_of_all_together() -> None:
    whole = PlanSearch(SMALL, max_plans=1)
    assert whole.run()
    cores = list(whole.degree_splits.list_splits())
    found = []
    for part in (cores[::2], cores[1::2]):
        search = PlanSearch(SMALL, max_plans=1)
        assert search.run(part)
        found += steps(search)
    assert min(found) == steps(whole)[0]


def test_what_is_known_before_does_not_change_the_answer() -> None:
    alone = PlanSearch(SMALL, max_plans=2)
    alone.run()
    quick = PlanSearch(restrict_to_common_layouts(SMALL), max_plans=2)
    quick.run()
    told = PlanSearch(SMALL, max_plans=2, known=quick.best)
    told.run()
    assert steps(told) == steps(alone)
    assert told.expanded_nodes <= alone.expanded_nodes + quick.expanded_nodes


def test_usual_layouts_are_never_better_than_all() -> None:
    quick = PlanSearch(restrict_to_common_layouts(SMALL), max_plans=1)
    quick.run()
    assert find_plans(SMALL, most=1, execute=False).best.step.step_s <= steps(quick)[0]


def test_plans_are_of_different_families_and_rise() -> None:
    search = PlanSearch(SMALL, max_plans=4)
    search.run()
    assert len({one.layout_family for one in search.best}) == 4
    assert steps(search) == sorted(steps(search))


def test_reports_never_promise_more_than_the_answer_keeps() -> None:
    reports: list[PlanProgress] = []
    search = PlanSearch(SPARSE, max_plans=1)
    search.run(report=reports.append)
    assert reports
    for progress in reports:
        assert progress.bound_s <= steps(search)[0]
        assert progress.best_step_s is None or progress.best_step_s >= steps(search)[0]


def test_a_search_that_is_stopped_keeps_its_best_and_says_how_much_is_open() -> None:
    def stop(progress: PlanProgress) -> None:
        if progress.best_step_s is not None:
            raise KeyboardInterrupt

    answer = find_plans(SPARSE, most=1, report=stop, execute=False)
    assert not answer.is_proved
    assert 0 <= answer.gap <= 1
    assert answer.bound_s <= find_plans(SPARSE, most=1, execute=False).best.step.step_s


def test_fixed_fields_stay_as_they_are_told() -> None:
    asked = question(tp=(4,), pp=(2,), schedule=("interleaved",), zero=(1,), recompute=("full",))
    layout = find_plans(asked, most=1, execute=False).best.layout
    assert (layout.tp, layout.pp, layout.schedule) == (4, 2, "interleaved")
    assert (layout.zero, layout.recompute) == (1, "full")


def test_groups_stay_in_one_node_where_they_must() -> None:
    orders = ("dp-tp-cp-ep-pp", "tp-cp-ep-dp-pp")
    asked = question("mixtral-8x7b", tp=(4,), ep=(1, 2, 4, 8), microbatch=(1,), order=orders)
    asked = replace(asked, space=replace(asked.space, fit_scale_up_domain=True))
    layout = find_plans(asked, most=1, execute=False).best.layout
    unit = count_domain_gpus(asked.cluster)
    for axes in ("tp", "cp", "ep", "expert_tp"):
        for group in list_process_groups(layout, axes):
            assert len({rank // unit for rank in group}) == 1


@pytest.mark.parametrize("share", [1.0, 0.6])
def test_no_plan_uses_more_memory_than_it_may(share: float) -> None:
    asked = replace(SMALL, space=replace(SMALL.space, max_memory=share))
    for plan in find_plans(asked, most=3, execute=False).plans:
        needed = predict_memory(asked.build_run(plan.layout)).worst_stage.total_bytes
        assert needed <= share * asked.cluster.gpu.memory_bytes


def test_less_memory_never_makes_a_step_faster() -> None:
    found = []
    for share in (1.0, 0.7, 0.5):
        asked = replace(SMALL, space=replace(SMALL.space, max_memory=share))
        found.append(find_plans(asked, most=1, execute=False).best.step.step_s)
    assert found == sorted(found)


@pytest.mark.parametrize(("name", "values"), [("offload_layers", (2,)), ("recompute_layers", (2,))])
def test_what_is_not_searched_is_refused(name: str, values: tuple[Any, ...]) -> None:
    with pytest.raises(InputError, match=name):
        find_plans(replace(SMALL, space=LayoutSpace(fixed={name: values})), execute=False)


@pytest.mark.parametrize("width", [1, 16, 10**6])
def test_a_beam_finds_nothing_better_than_the_proved_answer(width: int) -> None:
    proved = find_plans(SMALL, most=1, execute=False)
    found = find_plans(SMALL, most=1, beam=width, execute=False)
    assert found.best.step.step_s >= proved.best.step.step_s
    assert found.bound_s <= proved.best.step.step_s
    assert found.is_proved == (found.bound_s == found.best.step.step_s)


def test_a_beam_as_wide_as_the_space_proves_its_answer() -> None:
    found = find_plans(SPARSE, most=2, beam=10**6, execute=False)
    wanted = find_plans(SPARSE, most=2, execute=False)
    assert found.is_proved
    assert [one.step.step_s for one in found.plans] == [one.step.step_s for one in wanted.plans]


def test_what_may_go_to_the_host_makes_a_large_model_fit() -> None:
    large = replace(
        question("llama3.1-70b", gpus=8, cp=(1,), microbatch=(1,), offload=(("optimizer",),)),
        cluster=catalog.get_cluster("dgx-h100").with_gpus(8),
    )
    best = find_plans(large, most=1, execute=False).best
    assert best.layout.offload == ("optimizer",)
    assert best.memory.fits
    on_device = replace(large, space=replace(large.space, fixed={"cp": (1,), "microbatch": (1,)}))
    with pytest.raises(InputError, match="offload=optimizer"):
        find_plans(on_device, most=1, execute=False)
