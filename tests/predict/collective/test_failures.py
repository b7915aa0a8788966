"""Failed links, cards and GPUs: what is refused, and what planning around them saves."""

import pytest

from benchmarks.collective_machines import dgx1
from meshwright.errors import InputError
from meshwright.predict.collective import best, graph_network, rank, replan, without
from meshwright.predict.collective.failures import ring_around
from meshwright.spec.catalog import cluster
from meshwright.spec.cluster import LinkGraph, Vertex

MI300X = cluster("azure-nd-mi300x-v5").with_gpus(8)
TWO_NODES = cluster("h100-superpod").with_gpus(16)


def test_a_gpu_that_is_cut_off_is_refused_before_anything_is_ranked() -> None:
    graph = TWO_NODES.link_graph()
    lone = LinkGraph(
        vertices=(*graph.vertices, Vertex(name="gpu99", kind="gpu")), links=graph.links
    )
    with pytest.raises(InputError, match="gpu99 is cut off from the other 16 GPUs"):
        best(lone, "all_reduce", 1e6)
    assert best(lone, "all_reduce", 1e6, members=range(16)).seconds > 0


def test_a_dead_card_costs_less_after_planning_around_it() -> None:
    plan = replan(TWO_NODES, "all_reduce", 1e8, ["node0.nic3"])
    assert plan.kept is not None
    assert plan.before.seconds < plan.after.seconds < plan.kept.seconds
    assert plan.loss == pytest.approx(plan.after.seconds / plan.before.seconds - 1)
    assert plan.ranks == tuple(range(16))


def test_a_schedule_made_for_what_is_left_beats_leading_the_old_one_around() -> None:
    plan = replan(cluster("mi300x-box").with_gpus(8), "all_reduce", 1e9, ["gpu0~gpu1"])
    assert plan.kept is not None
    assert plan.after.name == "synthesised"
    assert plan.kept.seconds > 1.8 * plan.before.seconds
    # One of 28 links is gone: 1/28 of the bandwidth, and a little for deeper trees.
    assert 1 / 28 < plan.loss < 0.08


def test_before_and_after_have_the_same_choice_of_schedules() -> None:
    plan = replan(dgx1(), "all_reduce", 1e9, ["gpu6", "gpu7"])
    assert plan.before.name == plan.after.name == "synthesised"
    assert 0.3 < plan.loss < 0.5


def test_other_faults_than_the_network_are_not_hidden() -> None:
    with pytest.raises(InputError, match="is not a size"):
        replan(MI300X, "all_reduce", -1, ["gpu3"])


def test_a_dead_gpu_leaves_a_smaller_group() -> None:
    plan = replan(MI300X, "all_reduce", 1e8, ["gpu3"])
    assert plan.ranks == (0, 1, 2, 4, 5, 6, 7)
    assert plan.after.result.ranks == 7
    assert plan.kept is None


def test_a_ring_is_led_around_a_dead_link() -> None:
    graph = without(MI300X.link_graph(), ["gpu3~gpu4"])
    order = ring_around(graph_network(graph))
    neighbours = {frozenset((a, order[i - 1])) for i, a in enumerate(order)}
    assert sorted(order) == list(range(8))
    assert frozenset((3, 4)) not in neighbours


def test_the_best_algorithm_follows_the_size() -> None:
    small, large = (best(MI300X, "all_reduce", nbytes) for nbytes in (1e3, 1e9))
    assert small.collective.steps <= large.collective.steps
    ranked = rank(MI300X, "all_reduce", 1e9)
    assert [one.seconds for one in ranked] == sorted(one.seconds for one in ranked)
    assert len({one.name for one in ranked}) == len(ranked) > 5
