"""Failed links, cards and GPUs: what is refused, and what planning around them saves."""

import pytest

from meshwright.errors import InputError
from meshwright.predict.collective import best, graph_network, rank, replan, without
from meshwright.predict.collective.failures import ring_around
from meshwright.spec.catalog import cluster
from meshwright.spec.cluster import LinkGraph, Vertex

MI300X = cluster("azure-nd-mi300x-v5").with_gpus(8)
TWO_NODES = cluster("h100-superpod").with_gpus(16)


def test_a_dead_link_is_gone_in_both_directions() -> None:
    left = without(MI300X.link_graph(), ["gpu0~gpu1"])
    pairs = {(link.source, link.target) for link in left.links}
    assert not {("gpu0", "gpu1"), ("gpu1", "gpu0")} & pairs
    assert ("gpu0", "gpu2") in pairs


def test_an_arrow_takes_one_direction_away() -> None:
    left = without(MI300X.link_graph(), ["gpu0→gpu1"])
    pairs = {(link.source, link.target) for link in left.links}
    assert ("gpu0", "gpu1") not in pairs
    assert ("gpu1", "gpu0") in pairs


def test_an_isolated_gpu_is_named_with_what_is_left_on_its_side() -> None:
    graph = TWO_NODES.link_graph()
    with pytest.raises(InputError) as error:
        without(graph, ["gpu5~nvswitch0", "gpu5~node0.pcie5"])
    assert "gpu5 cannot" in str(error.value)
    assert "it has no link" in str(error.value)
    lone = LinkGraph(
        vertices=(*graph.vertices, Vertex(name="gpu99", kind="gpu")), links=graph.links
    )
    with pytest.raises(InputError, match="gpu99"):
        best(lone, "all_reduce", 1e6)


def test_unknown_parts_are_refused_with_what_there_is() -> None:
    with pytest.raises(InputError, match="no part named"):
        without(MI300X.link_graph(), ["gpu9"])
    with pytest.raises(InputError, match="gpu0 is linked to gpu1"):
        without(MI300X.link_graph(), ["gpu0~gpu0"])


def test_a_dead_card_costs_less_after_planning_around_it() -> None:
    plan = replan(TWO_NODES, "all_reduce", 1e8, ["node0.nic3"])
    assert plan.kept is not None
    assert plan.before.seconds < plan.after.seconds < plan.kept.seconds
    assert plan.loss == pytest.approx(plan.after.seconds / plan.before.seconds - 1)
    assert plan.ranks == tuple(range(16))


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
