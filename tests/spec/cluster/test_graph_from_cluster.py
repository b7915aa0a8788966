import msgspec
import pytest

from meshwright.errors import InputError
from meshwright.spec.catalog import list_clusters
from meshwright.spec.cluster import Cluster


@pytest.mark.parametrize("name", sorted(list_clusters()))
def test_every_catalog_cluster_can_be_drawn_without_isolated_gpus(name: str) -> None:
    cluster = list_clusters()[name]
    nodes = min(cluster.nodes, 3)
    graph = cluster.build_link_graph(nodes)
    assert len(graph.vertices_of_kind("gpu")) == nodes * cluster.gpus_per_node
    assert graph.isolated_gpus() == ()


@pytest.mark.parametrize("name", ["h100-superpod", "meta-llama3", "gb200-nvl72", "a100-pcie-box"])
def test_the_drawing_and_the_formulas_agree_where_each_gpu_has_its_card(name: str) -> None:
    cluster = list_clusters()[name]
    nodes = min(cluster.nodes, 3)
    graph = cluster.build_link_graph(nodes)
    for other in range(1, nodes * cluster.gpus_per_node):
        drawn = graph.path_bytes_per_s("gpu0", f"gpu{other}")
        assert drawn == pytest.approx(cluster.bandwidth_between(0, other)), other


def test_a_message_on_its_rail_takes_the_latency_of_the_formula(fat_tree: Cluster) -> None:
    graph = fat_tree.build_link_graph(20)
    for other in (8, 4 * 8, 16 * 8):
        route = graph.shortest_path("gpu0", f"gpu{other}")
        assert route is not None
        assert route.latency_s == pytest.approx(fat_tree.latency_between(0, other))


def test_a_leaf_of_a_rail_joins_that_rail_only(fat_tree: Cluster) -> None:
    graph = fat_tree.build_link_graph(8)
    cards = {link.source for link in graph.links if link.target == "leaf1.rail2"}
    assert cards == {f"node{n}.nic2" for n in (4, 5, 6, 7)} | {"spine0"}


def test_upper_links_carry_the_nodes_below_less_oversubscription(fat_tree: Cluster) -> None:
    graph = fat_tree.build_link_graph(64)
    rates = {(link.source, link.target): link.link_bytes_per_s for link in graph.links}
    # Four nodes with a 48 GB/s card each on the rail at 2:1; then 16 nodes of 8 cards at 6:1.
    assert rates["leaf0.rail0", "spine0"] == pytest.approx(4 * 48e9 / 2)
    assert rates["spine0", "core0"] == pytest.approx(16 * 8 * 48e9 / 6)


def test_a_half_filled_group_is_drawn_as_it_is(fat_tree: Cluster) -> None:
    graph = fat_tree.build_link_graph(5)
    rates = {(link.source, link.target): link.link_bytes_per_s for link in graph.links}
    assert rates["leaf1.rail0", "spine0"] == pytest.approx(48e9 / 2)


def test_cards_hang_on_the_switch_of_their_gpu() -> None:
    graph = list_clusters()["aws-p5"].build_link_graph(1)
    below = {link.target for link in graph.links_from("node0.pcie3")}
    cards = {f"node0.nic{index}" for index in range(12, 16)}
    assert below == {"gpu3", "node0.cpu0", *cards}


def test_only_so_many_gpus_can_be_drawn(fat_tree: Cluster) -> None:
    big = msgspec.structs.replace(fat_tree, nodes=1024)
    with pytest.raises(InputError, match="use 512 or fewer"):
        big.build_link_graph()
    with pytest.raises(InputError, match="use 1 to 64"):
        fat_tree.build_link_graph(65)
