from collections.abc import Callable

from meshwright.spec.cluster import GraphVertex, LinkGraph, find_rails, read_nccl_topology


def _card(
    name: str, node: str = "host0", rail: int | None = None, rate: float = 50e9
) -> GraphVertex:
    return GraphVertex(name=name, kind="nic", node=node, rail=rail, port_bytes_per_s=rate)


def _cards(*cards: GraphVertex) -> LinkGraph:
    return LinkGraph(vertices=cards, links=())


def test_cards_are_grouped_by_the_rail_they_name() -> None:
    found = find_rails(
        _cards(_card("a", rail=1), _card("b", rail=0), _card("c", rail=1), _card("s"))
    )
    assert [(rail.index, rail.nics) for rail in found] == [(0, ("b",)), (1, ("a", "c"))]
    assert all(rail.is_named for rail in found)


def test_without_names_the_order_in_each_host_decides() -> None:
    cards = [_card(f"{host}.{index}", host) for host in ("host0", "host1") for index in (0, 1)]
    found = find_rails(_cards(*cards))
    assert [rail.nics for rail in found] == [("host0.0", "host1.0"), ("host0.1", "host1.1")]
    assert not any(rail.is_named for rail in found)


def test_slower_cards_are_on_no_rail(text: Callable[[str], str]) -> None:
    graph = read_nccl_topology(text("hgx_h100.xml"))
    assert len(graph.vertices_of_kind("nic")) == 9
    found = find_rails(graph)
    assert [rail.index for rail in found] == list(range(8))
    assert found[7].nics == ("nic:mlx5_7",)


def test_a_machine_without_cards_has_no_rail() -> None:
    assert find_rails(_cards()) == ()
