import pytest

from meshwright.policy.collective.synthesis.routes import Routes
from meshwright.spec import catalog
from meshwright.spec.cluster.links import LinkGraph
from tests.policy.collective.synthesis.machines import drawn, star


def _routes(graph: LinkGraph) -> Routes:
    return Routes(graph, tuple(vertex.name for vertex in graph.of_kind("gpu")))


@pytest.mark.parametrize("name", ["h100-superpod", "aws-p5", "azure-nd-mi300x-v5", "l40s-pcie"])
def test_ways_are_as_wide_and_as_short_as_the_graphs_own(name: str) -> None:
    graph = catalog.cluster(name).link_graph(2)
    routes = _routes(graph)
    for b in range(1, routes.gpus):
        path = graph.widest_path("gpu0", f"gpu{b}")
        assert path is not None
        assert routes.width(0, b) == path.path_bytes_per_s
        assert routes.hops(0, b) == len(path.vertices) - 1


def test_a_transfer_is_spread_over_cards_that_tie() -> None:
    graph = catalog.cluster("aws-p5").link_graph(2)
    routes = _routes(graph)
    cards = {
        routes.names[u]: share
        for (u, t), share in routes.way(0, 8)
        if "nic" in routes.names[u] and "fabric" in routes.names[t]
    }
    assert cards == {f"node0.nic{index}": 0.25 for index in range(4)}


def test_gpus_end_ways() -> None:
    routes = _routes(drawn(3, {(0, 1): 10e9, (1, 2): 10e9}))
    assert routes.width(0, 2) == 0
    assert routes.way(0, 2) == ()


def test_latency_adds_up_along_a_way() -> None:
    assert _routes(star([10e9] * 3)).latency(0, 2) == pytest.approx(2e-6)
