"""Rails of a machine: which network cards are wired to the same plane of leaf switches.

NCCL's own files name rails since 2.30; it does not use them to route. It knows the cards of a
`LinkGraph`, not the fabric behind them.
"""

import msgspec

from meshwright.spec.cluster.link_graph import GraphVertex, LinkGraph


class Rail(msgspec.Struct, frozen=True, kw_only=True):
    """Cards, of one host or of several, that meet at the same leaf switches."""

    index: int
    """Its number in the fabric, or the cards' place in their hosts where none is named."""
    nics: tuple[str, ...]
    """Names of the card vertices, host by host."""
    is_named: bool
    """Whether the topology names the rail; otherwise it follows from the order of cards."""


def find_rails(graph: LinkGraph) -> tuple[Rail, ...]:
    """Return the rails of a machine, by number.

    Where any card names its rail, cards that name none (storage, management) are left out. Where
    no card does, the fastest cards of each host are numbered in their order: rail-optimised
    fabrics are cabled that way.
    """
    cards = graph.vertices_of_kind("nic")
    named = any(card.rail is not None for card in cards)
    numbers = {card.name: card.rail for card in cards if card.rail is not None}
    if not named:
        numbers = _by_order(cards)
    members: dict[int, list[str]] = {}
    for name, number in numbers.items():
        members.setdefault(number, []).append(name)
    return tuple(
        Rail(index=number, nics=tuple(members[number]), is_named=named)
        for number in sorted(members)
    )


def _by_order(cards: tuple[GraphVertex, ...]) -> dict[str, int]:
    """Number the fastest cards of each host from 0; cards of unknown speed only among others."""
    fastest = max((card.port_bytes_per_s or 0.0 for card in cards), default=0.0)
    counts: dict[str, int] = {}
    numbers: dict[str, int] = {}
    for card in cards:
        if (card.port_bytes_per_s or 0.0) == fastest:
            numbers[card.name] = counts.get(card.node, 0)
            counts[card.node] = numbers[card.name] + 1
    return numbers
