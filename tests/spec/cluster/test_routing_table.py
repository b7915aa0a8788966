"""The ways of transfers over a graph: what they pass through, how they divide, who passes on."""

import pytest

from meshwright.spec import catalog
from meshwright.spec.cluster.failed_components import remove_components
from meshwright.spec.cluster.link_graph import (
    GraphLink,
    GraphVertex,
    LinkGraph,
    LinkKind,
    VertexKind,
    make_duplex_links,
)
from meshwright.spec.cluster.routing_table import RoutingTable, TransferPath

KINDS: dict[str, VertexKind] = {"g": "gpu", "c": "cpu", "s": "switch", "p": "pcie-switch"}


def drawn(**pairs: tuple[float, LinkKind]) -> LinkGraph:
    """Draw links such as `g0_g1=(25e9, "nvlink")`; the first letter says what a vertex is."""
    links: list[GraphLink] = []
    for ends, (rate, kind) in pairs.items():
        a, b = ends.split("_")
        links += make_duplex_links(a, b, kind, rate, 1e-6)
    names = dict.fromkeys(end for ends in pairs for end in ends.split("_"))
    vertices = tuple(GraphVertex(name=name, kind=KINDS[name[0]]) for name in names)
    return LinkGraph(vertices=vertices, links=tuple(links))


def way(graph: LinkGraph, a: str, b: str, gpus: tuple[str, ...] | None = None) -> TransferPath:
    ways = RoutingTable(graph, gpus)
    found = ways.find_path(ways.vertex_index[a], ways.vertex_index[b])
    assert found is not None
    return found


def path(graph: LinkGraph, a: str, b: str, gpus: tuple[str, ...] | None = None) -> list[str]:
    """The vertices of a way that does not divide."""
    names = RoutingTable(graph, gpus).names
    found = way(graph, a, b, gpus)
    assert all(share == 1 for _, share in found.arc_shares)
    return [a, *(names[t] for _, t in found.arcs)]


def test_a_gpu_passes_data_on_rather_than_a_cpu() -> None:
    graph = catalog.get_cluster("mi300x-box").build_link_graph(1)
    assert path(graph, "gpu0", "gpu1") == ["gpu0", "gpu1"]
    broken = way(remove_components(graph, ["gpu0~gpu1"]), "gpu0", "gpu1")
    assert (broken.cpus, broken.relay_gpus, broken.hops) == (0, 1, 2)


def test_of_gpus_that_tie_the_next_after_the_sender_passes_data_on() -> None:
    mesh = remove_components(catalog.get_cluster("mi300x-box").build_link_graph(1), ["gpu5~gpu6"])
    assert path(mesh, "gpu5", "gpu6") == ["gpu5", "gpu7", "gpu6"]
    assert path(mesh, "gpu6", "gpu5") == ["gpu6", "gpu7", "gpu5"]
    cards = remove_components(
        catalog.get_cluster("azure-nd-h100-v5").build_link_graph(2),
        [f"node1.nic{index}" for index in (1, 3, 5, 7)],
    )
    assert [path(cards, f"gpu{gpu}", "gpu0")[2] for gpu in (9, 11, 13)] == [
        "gpu10",
        "gpu12",
        "gpu14",
    ]


def test_a_way_divides_in_proportion_to_its_links() -> None:
    graph = drawn(
        g0_p0=(10e9, "pcie"), g0_p1=(30e9, "pcie"), p0_g1=(40e9, "pcie"), p1_g1=(40e9, "pcie")
    )
    # Not in proportion to what is widest: only the wider of the two paths is taken at all.
    assert path(graph, "g0", "g1") == ["g0", "p1", "g1"]
    fair = drawn(
        g0_p0=(10e9, "pcie"), p0_p1=(20e9, "pcie"), p0_p2=(60e9, "pcie"),
        p1_g1=(10e9, "pcie"), p2_g1=(10e9, "pcie"),
    )  # fmt: skip
    shares = [share for _, share in way(fair, "g0", "g1").arc_shares]
    assert shares == pytest.approx([1, 0.25, 0.75, 0.25, 0.75])


def test_cards_beside_one_gpu_share_a_transfer() -> None:
    graph = catalog.get_cluster("aws-p5").build_link_graph(2)
    ways = RoutingTable(graph)
    found = ways.find_path(0, 8)
    assert found is not None
    cards = {ways.names[u]: part for (u, t), part in found.arc_shares if "fabric" in ways.names[t]}
    assert cards == {f"node0.nic{index}": 0.25 for index in range(4)}


def test_another_rail_is_reached_over_the_neighbour_that_is_on_it() -> None:
    graph = catalog.get_cluster("h100-superpod").build_link_graph(2)
    met = path(graph, "gpu0", "gpu11")
    assert met[:5] == ["gpu0", "nvswitch0", "gpu3", "node0.pcie3", "node0.nic3"]
    assert "gpu8" not in met


def test_what_came_over_pcie_is_not_passed_on() -> None:
    graph = drawn(g0_p0=(10e9, "pcie"), p0_g1=(10e9, "pcie"), g1_g2=(25e9, "nvlink"))
    ways = RoutingTable(graph)
    assert ways.find_path(ways.vertex_index["g0"], ways.vertex_index["g2"]) is None
    assert path(graph, "g2", "g0") == ["g2", "g1", "p0", "g0"]


def test_gpus_that_take_no_part_pass_nothing_on() -> None:
    chain = drawn(g0_g1=(25e9, "nvlink"), g1_g2=(25e9, "nvlink"), g2_c0=(9e9, "pcie"))
    around = LinkGraph(
        vertices=chain.vertices, links=(*chain.links, *make_duplex_links("c0", "g0", "pcie", 9e9))
    )
    assert path(around, "g0", "g2") == ["g0", "g1", "g2"]
    assert path(around, "g0", "g2", ("g0", "g2")) == ["g0", "c0", "g2"]


def test_few_switches_come_before_width_and_width_before_few_links() -> None:
    graph = drawn(
        g0_s0=(5e9, "network"), s0_g1=(5e9, "network"),
        g0_s1=(50e9, "network"), s1_s2=(50e9, "network"), s2_g1=(50e9, "network"),
    )  # fmt: skip
    assert path(graph, "g0", "g1") == ["g0", "s0", "g1"]
    longer = drawn(
        g0_p0=(5e9, "pcie"), p0_g1=(5e9, "pcie"),
        g0_p1=(50e9, "pcie"), p1_p2=(50e9, "pcie"), p2_g1=(50e9, "pcie"),
    )  # fmt: skip
    assert path(longer, "g0", "g1") == ["g0", "p1", "p2", "g1"]


def test_a_wide_beginning_does_not_lengthen_a_way_that_is_narrow_later() -> None:
    graph = drawn(
        g0_p0=(90e9, "pcie"), p0_p1=(90e9, "pcie"), g0_p1=(20e9, "pcie"), p1_g1=(10e9, "pcie")
    )
    assert path(graph, "g0", "g1") == ["g0", "p1", "g1"]


def test_latency_adds_up_along_a_way_and_decides_last() -> None:
    assert way(drawn(g0_p0=(1e9, "pcie"), p0_g1=(1e9, "pcie")), "g0", "g1").latency_s == 2e-6
    two = drawn(g0_p0=(1e9, "pcie"), p0_g1=(1e9, "pcie"), g0_p1=(1e9, "pcie"))
    slow = make_duplex_links("p1", "g1", "pcie", 1e9, 5e-6)
    both = LinkGraph(vertices=two.vertices, links=(*two.links, *slow))
    assert path(both, "g0", "g1") == ["g0", "p0", "g1"]


def test_ways_through_other_gpus_are_made_of_legs() -> None:
    ways = RoutingTable(
        remove_components(catalog.get_cluster("h100-superpod").build_link_graph(2), ["node0.nic3"])
    )
    for a in range(ways.gpus):
        for b in range(ways.gpus):
            found = ways.find_path(a, b)
            assert found is not None
            assert sum(part for (_, t), part in found.arc_shares if t == b) == pytest.approx(
                int(a != b)
            )
            met = {u for u, _ in found.arcs if u < ways.gpus and u != a}
            assert bool(met) == bool(found.relay_gpus)
            assert all(
                ways.find_direct_path(a, relay) and ways.find_direct_path(relay, b) for relay in met
            )
