import pytest

from meshwright.errors import InputError
from meshwright.spec.cluster import GraphLink, GraphVertex, LinkGraph
from meshwright.spec.cluster.link_graph import DisjointSets, make_duplex_links


def _graph(*links: GraphLink) -> LinkGraph:
    names = dict.fromkeys(end for link in links for end in (link.source, link.target))
    kinds = {"g": "gpu", "c": "cpu", "p": "pcie-switch", "n": "nvswitch"}
    vertices = tuple(GraphVertex(name=n, kind=kinds[n[0]]) for n in names)  # type: ignore[arg-type]
    return LinkGraph(vertices=vertices, links=links)


BOX = _graph(
    *make_duplex_links("g0", "p0", "pcie", 30e9, 1e-6),
    *make_duplex_links("g1", "p0", "pcie", 30e9, 1e-6),
    *make_duplex_links("g2", "p1", "pcie", 15e9, 1e-6),
    *make_duplex_links("p0", "c0", "pcie", 20e9, 1e-6),
    *make_duplex_links("p1", "c0", "pcie", 20e9, 1e-6),
    *make_duplex_links("g0", "n0", "nvlink", 300e9, 3e-6),
    *make_duplex_links("g1", "n0", "nvlink", 300e9, 3e-6),
)


def test_the_widest_path_avoids_the_narrow_link() -> None:
    route = BOX.widest_path("g0", "g1")
    assert route is not None
    assert route.vertices == ("g0", "n0", "g1")
    assert route.path_bytes_per_s == 300e9
    assert BOX.path_bytes_per_s("g0", "g2") == 15e9


def test_the_shortest_path_takes_the_least_latency() -> None:
    route = BOX.shortest_path("g0", "g1")
    assert route is not None
    assert route.vertices == ("g0", "p0", "g1")
    assert route.latency_s == pytest.approx(2e-6)


def test_gpus_do_not_pass_data_on() -> None:
    chain = _graph(
        *make_duplex_links("g0", "g1", "nvlink", 1e9), *make_duplex_links("g1", "g2", "nvlink", 1e9)
    )
    assert chain.widest_path("g0", "g2") is None
    assert chain.path_bytes_per_s("g0", "g2") == 0.0


def test_a_link_goes_one_way() -> None:
    one_way = _graph(GraphLink(source="g0", target="g1", kind="nvlink", link_bytes_per_s=1e9))
    assert one_way.path_bytes_per_s("g0", "g1") == 1e9
    assert one_way.path_bytes_per_s("g1", "g0") == 0.0


def test_a_gpu_without_links_is_isolated() -> None:
    lonely = LinkGraph(
        vertices=(*BOX.vertices, GraphVertex(name="g9", kind="gpu")), links=BOX.links
    )
    assert lonely.isolated_gpus() == ("g9",)
    assert BOX.isolated_gpus() == ()


def test_a_single_gpu_is_not_isolated() -> None:
    assert LinkGraph(vertices=(GraphVertex(name="g0", kind="gpu"),), links=()).isolated_gpus() == ()


def test_a_path_to_itself_is_free() -> None:
    route = BOX.widest_path("g0", "g0")
    assert route is not None
    assert route.latency_s == 0.0


def test_an_unknown_vertex_gets_a_suggestion() -> None:
    with pytest.raises(InputError, match="no vertex named 'gg0'"):
        BOX.widest_path("gg0", "g1")


def test_a_graph_refuses_loose_ends_and_doubles() -> None:
    link = GraphLink(source="g0", target="g1", kind="nvlink", link_bytes_per_s=1e9)
    twice = GraphVertex(name="g0", kind="gpu")
    with pytest.raises(InputError) as caught:
        LinkGraph(vertices=(twice, twice), links=(link, link))
    text = str(caught.value)
    assert "named more than once: g0" in text
    assert "no vertex named 'g1'" in text
    assert "listed twice" in text


def test_a_link_needs_two_ends_and_a_rate() -> None:
    with pytest.raises(InputError) as caught:
        GraphLink(source="a", target="a", kind="nvlink", link_bytes_per_s=0)
    assert {problem.where for problem in caught.value.problems} == {"target", "link_bytes_per_s"}


def test_groups_are_known_by_their_first_name() -> None:
    groups = DisjointSets(["a", "b", "c", "d"])
    groups.union("d", "b")
    groups.union("b", "c")
    assert groups.find("d") == "b"
    assert groups.list_sets() == [["a"], ["b", "c", "d"]]
    assert groups.members("c") == ["b", "c", "d"]
