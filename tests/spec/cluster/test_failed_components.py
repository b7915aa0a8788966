"""Parts taken out of a graph, and the GPUs that are cut off by it."""

import pytest

from meshwright.errors import InputError
from meshwright.spec.catalog import get_cluster
from meshwright.spec.cluster import GraphVertex, LinkGraph
from meshwright.spec.cluster.failed_components import remove_components, require_connected
from meshwright.spec.cluster.link_graph import GraphLink, make_duplex_links

MESH = get_cluster("azure-nd-mi300x-v5").with_gpus(8).build_link_graph()
TWO_NODES = get_cluster("h100-superpod").with_gpus(16).build_link_graph()


def pairs(graph: LinkGraph) -> set[tuple[str, str]]:
    return {(link.source, link.target) for link in graph.links}


def islands(*links: GraphLink) -> LinkGraph:
    names = dict.fromkeys(end for link in links for end in (link.source, link.target))
    vertices = tuple(GraphVertex(name=name, kind="gpu") for name in names)
    return LinkGraph(vertices=vertices, links=links)


def test_a_dead_link_is_gone_in_both_directions() -> None:
    left = pairs(remove_components(MESH, ["gpu0~gpu1"]))
    assert not {("gpu0", "gpu1"), ("gpu1", "gpu0")} & left
    assert ("gpu0", "gpu2") in left


@pytest.mark.parametrize("arrow", ["→", "->", " → "])
def test_an_arrow_takes_one_direction_away(arrow: str) -> None:
    left = pairs(remove_components(MESH, [f"gpu0{arrow}gpu1"]))
    assert ("gpu0", "gpu1") not in left
    assert ("gpu1", "gpu0") in left


def test_a_dead_vertex_goes_with_its_links() -> None:
    left = remove_components(TWO_NODES, ["leaf0.rail3", "gpu5"])
    assert {"leaf0.rail3", "gpu5"}.isdisjoint(vertex.name for vertex in left.vertices)
    assert {"leaf0.rail3", "gpu5"}.isdisjoint(end for pair in pairs(left) for end in pair)


def test_unknown_parts_are_refused_with_what_there_is() -> None:
    with pytest.raises(InputError, match="no part named"):
        remove_components(MESH, ["gpu9"])
    with pytest.raises(InputError, match="gpu0 is linked to gpu1"):
        remove_components(MESH, ["gpu0~gpu0"])
    with pytest.raises(InputError, match="no part named 'gpu0~'"):
        remove_components(MESH, ["gpu0~"])


def test_a_gpu_that_is_cut_off_is_named_with_what_is_left_there() -> None:
    with pytest.raises(InputError, match="gpu5 is cut off from the other 15 GPUs: no link is left"):
        remove_components(TWO_NODES, ["gpu5~nvswitch0", "gpu5~node0.pcie5"])
    with pytest.raises(InputError, match=r"only node0\.nic5, node0\.pcie5 on that side"):
        remove_components(
            TWO_NODES, ["gpu5~nvswitch0", "node0.pcie5~node0.cpu1", "node0.nic5~leaf0.rail5"]
        )


def test_the_smaller_of_two_sides_is_said_to_be_cut_off() -> None:
    halves = islands(
        *make_duplex_links("a0", "a1", "nvlink", 1e9),
        *make_duplex_links("b0", "b1", "nvlink", 1e9),
        *make_duplex_links("b1", "b2", "nvlink", 1e9),
    )
    with pytest.raises(InputError, match="a0, a1 are cut off from the other 3 GPUs: no link leads"):
        require_connected(halves)
    require_connected(halves, ["b0", "b1", "b2"])
    with pytest.raises(InputError, match="b2 is cut off from the other 1 GPUs"):
        require_connected(halves, ["b0", "b2"])  # b1 takes no part, so it passes nothing on


def test_a_gpu_that_is_reached_but_cannot_answer_is_cut_off() -> None:
    one_way = islands(
        *make_duplex_links("g0", "g1", "nvlink", 1e9),
        GraphLink(source="g0", target="g2", kind="nvlink", link_bytes_per_s=1e9),
    )
    with pytest.raises(InputError, match=r"g2 is cut off .* no link leads across, or only one way"):
        require_connected(one_way)


def test_a_graph_without_gpus_is_refused() -> None:
    with pytest.raises(InputError, match="the graph has no GPU"):
        require_connected(LinkGraph(vertices=(GraphVertex(name="s0", kind="switch"),), links=()))
