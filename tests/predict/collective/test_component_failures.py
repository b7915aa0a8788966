"""Failed links, cards and GPUs: what is refused, and what planning around them saves."""

import pytest

from benchmarks.collective_machines import dgx1
from meshwright.errors import InputError
from meshwright.predict.collective import (
    build_graph_network,
    find_best_algorithm,
    rank_algorithms,
    remove_components,
    replan_after_failure,
)
from meshwright.predict.collective.component_failures import find_ring_order
from meshwright.spec.catalog import get_cluster
from meshwright.spec.cluster import GraphVertex, LinkGraph

MI300X = get_cluster("azure-nd-mi300x-v5").with_gpus(8)
TWO_NODES = get_cluster("h100-superpod").with_gpus(16)


def test_a_gpu_that_is_cut_off_is_refused_before_anything_is_ranked() -> None:
    graph = TWO_NODES.build_link_graph()
    lone = LinkGraph(
        vertices=(*graph.vertices, GraphVertex(name="gpu99", kind="gpu")), links=graph.links
    )
    with pytest.raises(InputError, match="gpu99 is cut off from the other 16 GPUs"):
        find_best_algorithm(lone, "all_reduce", 1e6)
    assert find_best_algorithm(lone, "all_reduce", 1e6, members=range(16)).seconds > 0


def test_a_dead_card_costs_less_after_planning_around_it() -> None:
    plan = replan_after_failure(TWO_NODES, "all_reduce", 1e8, ["node0.nic3"])
    assert plan.rerouted is not None
    assert plan.before.seconds < plan.after.seconds < plan.rerouted.seconds
    assert plan.slowdown == pytest.approx(plan.after.seconds / plan.before.seconds - 1)
    assert plan.surviving_ranks == tuple(range(16))


def test_a_schedule_made_for_what_is_left_beats_leading_the_old_one_around() -> None:
    plan = replan_after_failure(
        get_cluster("mi300x-box").with_gpus(8), "all_reduce", 1e9, ["gpu0~gpu1"]
    )
    assert plan.rerouted is not None
    assert plan.after.name == "synthesised"
    assert plan.rerouted.seconds > 1.8 * plan.before.seconds
    # One of 28 links is gone: 1/28 of the bandwidth, and a little for deeper trees.
    assert 1 / 28 < plan.slowdown < 0.08


def test_before_and_after_have_the_same_choice_of_schedules() -> None:
    plan = replan_after_failure(dgx1(), "all_reduce", 1e9, ["gpu6", "gpu7"])
    assert plan.before.name == plan.after.name == "synthesised"
    assert 0.3 < plan.slowdown < 0.5


def test_other_faults_than_the_network_are_not_hidden() -> None:
    with pytest.raises(InputError, match="is not a size"):
        replan_after_failure(MI300X, "all_reduce", -1, ["gpu3"])


def test_a_dead_gpu_leaves_a_smaller_group() -> None:
    plan = replan_after_failure(MI300X, "all_reduce", 1e8, ["gpu3"])
    assert plan.surviving_ranks == (0, 1, 2, 4, 5, 6, 7)
    assert plan.after.result.ranks == 7
    assert plan.rerouted is None


def test_a_ring_is_led_around_a_dead_link() -> None:
    graph = remove_components(MI300X.build_link_graph(), ["gpu3~gpu4"])
    order = find_ring_order(build_graph_network(graph))
    neighbours = {frozenset((a, order[i - 1])) for i, a in enumerate(order)}
    assert sorted(order) == list(range(8))
    assert frozenset((3, 4)) not in neighbours


def test_the_best_algorithm_follows_the_size() -> None:
    small, large = (find_best_algorithm(MI300X, "all_reduce", nbytes) for nbytes in (1e3, 1e9))
    assert small.collective.steps <= large.collective.steps
    ranked = rank_algorithms(MI300X, "all_reduce", 1e9)
    assert [one.seconds for one in ranked] == sorted(one.seconds for one in ranked)
    assert len({one.name for one in ranked}) == len(ranked) > 5
