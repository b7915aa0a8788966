import pytest

from meshwright.errors import InputError
from meshwright.spec.cluster import Link, LinkGraph, Vertex
from meshwright.spec.cluster.links import Groups, both_ways


def _graph(*links: Link) -> LinkGraph:
    names = dict.fromkeys(end for link in links for end in (link.source, link.target))
    kinds = {"g": "gpu", "c": "cpu", "p": "pcie-switch", "n": "nvswitch"}
    vertices = tuple(Vertex(name=n, kind=kinds[n[0]]) for n in names)  # type: ignore[arg-type]
    return LinkGraph(vertices=vertices, links=links)


BOX = _graph(
    *both_ways("g0", "p0", "pcie", 30e9, 1e-6),
    *both_ways("g1", "p0", "pcie", 30e9, 1e-6),
    *both_ways("g2", "p1", "pcie", 15e9, 1e-6),
    *both_ways("p0", "c0", "pcie", 20e9, 1e-6),
    *both_ways("p1", "c0", "pcie", 20e9, 1e-6),
    *both_ways("g0", "n0", "nvlink", 300e9, 3e-6),
    *both_ways("g1", "n0", "nvlink", 300e9, 3e-6),
)


def test_the_widest_path_avoids_the_narrow_link() -> None:
    route = BOX.widest_path("g0", "g1")
    assert route is not None
    assert route.vertices == ("g0", "n0", "g1")
    assert route.path_bytes_per_s == 300e9
    assert BOX.bandwidth("g0", "g2") == 15e9


def test_the_shortest_path_takes_the_least_latency() -> None:
    route = BOX.shortest_path("g0", "g1")
    assert route is not None
    assert route.vertices == ("g0", "p0", "g1")
    assert route.latency_s == pytest.approx(2e-6)


def test_gpus_do_not_pass_data_on() -> None:
    chain = _graph(*both_ways("g0", "g1", "nvlink", 1e9), *both_ways("g1", "g2", "nvlink", 1e9))
    assert chain.widest_path("g0", "g2") is None
    assert chain.bandwidth("g0", "g2") == 0.0


def test_a_link_goes_one_way() -> None:
    one_way = _graph(Link(source="g0", target="g1", kind="nvlink", link_bytes_per_s=1e9))
    assert one_way.bandwidth("g0", "g1") == 1e9
    assert one_way.bandwidth("g1", "g0") == 0.0


def test_a_gpu_without_links_is_isolated() -> None:
    lonely = LinkGraph(vertices=(*BOX.vertices, Vertex(name="g9", kind="gpu")), links=BOX.links)
    assert lonely.isolated_gpus() == ("g9",)
    assert BOX.isolated_gpus() == ()


def test_a_single_gpu_is_not_isolated() -> None:
    assert LinkGraph(vertices=(Vertex(name="g0", kind="gpu"),), links=()).isolated_gpus() == ()


def test_a_path_to_itself_is_free() -> None:
    route = BOX.widest_path("g0", "g0")
    assert route is not None
    assert route.latency_s == 0.0


def test_an_unknown_vertex_gets_a_suggestion() -> None:
    with pytest.raises(InputError, match="no vertex named 'gg0'"):
        BOX.widest_path("gg0", "g1")


def test_a_graph_refuses_loose_ends_and_doubles() -> None:
    link = Link(source="g0", target="g1", kind="nvlink", link_bytes_per_s=1e9)
    twice = Vertex(name="g0", kind="gpu")
    with pytest.raises(InputError) as caught:
        LinkGraph(vertices=(twice, twice), links=(link, link))
    text = str(caught.value)
    assert "named more than once: g0" in text
    assert "no vertex named 'g1'" in text
    assert "listed twice" in text


def test_a_link_needs_two_ends_and_a_rate() -> None:
    with pytest.raises(InputError) as caught:
        Link(source="a", target="a", kind="nvlink", link_bytes_per_s=0)
    assert {problem.where for problem in caught.value.problems} == {"target", "link_bytes_per_s"}


def test_groups_are_known_by_their_first_name() -> None:
    groups = Groups(["a", "b", "c", "d"])
    groups.join("d", "b")
    groups.join("b", "c")
    assert groups.of("d") == "b"
    assert groups.all() == [["a"], ["b", "c", "d"]]
    assert groups.members("c") == ["b", "c", "d"]
