from collections.abc import Callable

from meshwright.spec.cluster import LinkGraph, Vertex, rails, read_nccl_topology


def _card(name: str, node: str = "host0", rail: int | None = None, rate: float = 50e9) -> Vertex:
    return Vertex(name=name, kind="nic", node=node, rail=rail, port_bytes_per_s=rate)


def _cards(*cards: Vertex) -> LinkGraph:
    return LinkGraph(vertices=cards, links=())


def test_cards_are_grouped_by_the_rail_they_name() -> None:
    found = rails(_cards(_card("a", rail=1), _card("b", rail=0), _card("c", rail=1), _card("s")))
    assert [(rail.number, rail.cards) for rail in found] == [(0, ("b",)), (1, ("a", "c"))]
    assert all(rail.named for rail in found)


def test_without_names_the_order_in_each_host_decides() -> None:
    cards = [_card(f"{host}.{index}", host) for host in ("host0", "host1") for index in (0, 1)]
    found = rails(_cards(*cards))
    assert [rail.cards for rail in found] == [("host0.0", "host1.0"), ("host0.1", "host1.1")]
    assert not any(rail.named for rail in found)


def test_slower_cards_are_on_no_rail(text: Callable[[str], str]) -> None:
    graph = read_nccl_topology(text("hgx_h100.xml"))
    assert len(graph.of_kind("nic")) == 9
    found = rails(graph)
    assert [rail.number for rail in found] == list(range(8))
    assert found[7].cards == ("nic:mlx5_7",)


def test_a_machine_without_cards_has_no_rail() -> None:
    assert rails(_cards()) == ()
