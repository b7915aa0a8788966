"""What binds a plan: each cost is there, where its cause is."""

import pytest
from msgspec.structs import replace

from meshwright.predict.plan import PlanAnswer, PlanQuestion, find_plans
from meshwright.predict.plan.studies.bottlenecks import (
    PlanBottleneck,
    find_bottlenecks,
    find_slowest_link,
    plan_with_more_memory,
)
from meshwright.predict.plan.studies.pareto_front import min_bytes_needed
from tests.predict.plan.tiny import SPARSE, answered, asked


def solved(question: PlanQuestion) -> PlanAnswer:
    return find_plans(question, most=1, execute=False)


def by_name(answer: PlanAnswer) -> dict[str, PlanBottleneck]:
    return {one.resource: one for one in find_bottlenecks(answer)}


def test_the_costliest_comes_first() -> None:
    costs = [one.cost_s for one in find_bottlenecks(answered())]
    assert costs == sorted(costs, reverse=True)
    assert len(costs) > 1


def test_parts_of_a_step_cost_what_the_step_says() -> None:
    answer = solved(asked(16, fixed=("pp=4", "tp=2", "schedule=1f1b")))
    found, step = by_name(answer), answer.best.step
    assert found["compute"].cost_s == step.compute_s
    assert found["bubble"].cost_s == step.bubble_s > 0
    assert "on 4 stages under 1f1b" in found["bubble"].evidence


def test_exchange_inside_a_node_is_put_down_to_the_fast_links() -> None:
    answer = solved(asked(8, fixed=("tp=8", "overlap_tp=off")))
    found = by_name(answer)
    assert found["nvlink"].cost_s >= answer.best.step.tp_s > 0
    assert "tensor" in found["nvlink"].evidence
    assert "network" not in found


def test_exchange_that_leaves_nodes_over_thin_cards_is_put_down_to_the_network() -> None:
    question = asked(16, fixed=("tp=1", "pp=1", "cp=1", "zero=3"))
    nics = question.cluster.nics
    assert nics is not None
    thin = replace(nics, nic_bytes_per_s=nics.nic_bytes_per_s / 100)
    answer = solved(replace(question, cluster=replace(question.cluster, nics=thin)))
    found = by_name(answer)["network"]
    assert "data" in found.evidence
    assert found.cost_s >= answer.best.step.dp_s > 0
    assert "twice the bandwidth would save" in found.evidence


def test_twice_the_network_doubles_cards_and_the_way_to_them() -> None:
    # The cards of this cluster are as fast as the PCIe links they hang on.
    answer = solved(asked(16, fixed=("tp=1", "pp=1", "cp=1", "zero=3", "overlap_parameters=off")))
    found = by_name(answer)["network"]
    assert "would save this layout 0" not in found.evidence


@pytest.mark.parametrize(("axis", "link"), [("tp", "fast links"), ("dp", "network")])
def test_groups_cross_the_links_they_lie_on(axis: str, link: str) -> None:
    answer = solved(asked(16, fixed=("tp=8", "pp=1", "cp=1", "order=tp-cp-ep-dp-pp")))
    assert find_slowest_link(answer.best.job, axis) == link


def test_layers_of_experts_wait_for_the_host() -> None:
    answer = solved(asked(model=SPARSE))
    found = by_name(answer)["host pace"]
    assert 0 < found.cost_s < answer.best.step.step_s
    graphs = replace(answer.question.framework, cuda_graphs=True)
    freed = replace(answer, question=replace(answer.question, framework=graphs))
    assert "host pace" not in by_name(freed)


def test_imbalance_of_experts_costs_what_balance_would_save() -> None:
    # Long sequences, so that kernels and not the host set the pace.
    question = asked(model=SPARSE, fixed=("ep=8", "microbatch=8"), expert_imbalance=2.0)
    found = by_name(solved(question))["expert imbalance"]
    assert found.cost_s > 0
    assert "2 times the mean" in found.evidence


def test_memory_with_room_to_spare_costs_nothing() -> None:
    found = by_name(answered())["memory"]
    assert found.cost_s == 0
    assert "would save nothing" in found.evidence


def test_more_memory_saves_time_where_it_is_short() -> None:
    roomy = solved(asked(fixed=("pp=1", "microbatch=8", "offload=none")))
    need = min_bytes_needed(roomy.best.memory)
    question = asked(fixed=("pp=1", "microbatch=8", "offload=none"), memory_gb=0.95 * need / 1e9)
    tight = solved(question)
    better = plan_with_more_memory(question, tight.best)
    assert better.step.step_s < tight.best.step.step_s
    assert by_name(tight)["memory"].cost_s == pytest.approx(
        tight.best.step.step_s - better.step.step_s
    )


def test_more_memory_is_never_worse_and_an_exact_search_no_worse_than_a_quick_one() -> None:
    for memory_gb in (3.0, 4.0, 6.0):
        question = asked(memory_gb=memory_gb)
        plan = solved(question).best
        quick = plan_with_more_memory(question, plan).step.step_s
        assert (
            plan_with_more_memory(question, plan, exact=True).step.step_s
            <= quick
            <= plan.step.step_s
        )
