"""Rings over nodes: each network card carries one channel, and hops stay on their rail."""

from collections import Counter

import numpy as np
import pytest

from meshwright.policy.collective import build_algorithm
from meshwright.policy.collective.algorithms.algorithm_shape import AlgorithmShape, list_ring_orders


def crossings(nodes: int, per_node: int, channels: int) -> list[tuple[int, int, int]]:
    """Return the hops between nodes, as (channel, from, to)."""
    shape = AlgorithmShape(ranks=nodes * per_node, per_node=per_node, channels=channels)
    found = []
    for channel, order in enumerate(list_ring_orders(shape)):
        for src, dst in zip(order, np.roll(order, -1), strict=True):
            if src // per_node != dst // per_node:
                found.append((channel, src, int(dst)))
    return found


@pytest.mark.parametrize("nodes", [2, 3, 4, 8])
def test_every_card_sends_and_receives_one_channel(nodes: int) -> None:
    hops = crossings(nodes, 8, 8)
    assert set(Counter(src for _, src, _ in hops).values()) == {1}
    assert set(Counter(dst for _, _, dst in hops).values()) == {1}
    assert len(hops) == 8 * nodes


@pytest.mark.parametrize("nodes", [2, 4, 8])
def test_hops_between_an_even_number_of_nodes_stay_on_their_rail(nodes: int) -> None:
    assert all(src % 8 == dst % 8 for _, src, dst in crossings(nodes, 8, 4))


def test_with_an_odd_number_of_nodes_one_hop_per_channel_changes_rails() -> None:
    changes = Counter(channel for channel, src, dst in crossings(5, 8, 4) if src % 8 != dst % 8)
    assert changes == dict.fromkeys(range(4), 1)


def test_a_ring_is_entered_once_per_node() -> None:
    assert all(
        count == 1 for count in Counter((c, dst // 4) for c, _, dst in crossings(6, 4, 3)).values()
    )


def test_orders_given_by_hand_are_followed() -> None:
    ring = build_algorithm("ring", "all_gather", 4, orders=[(0, 2, 1, 3), (3, 1, 2, 0)])
    hops = {
        (src, dst, channel)
        for _, moves in ring.iterate_steps()
        for src, dst, *_, channel, _ in moves.table.tolist()
    }
    assert ring.channels == 2
    assert hops == {
        *((s, d, 0) for s, d in ((0, 2), (2, 1), (1, 3), (3, 0))),
        *((s, d, 1) for s, d in ((3, 1), (1, 2), (2, 0), (0, 3))),
    }


def test_a_ring_in_any_order_is_as_small_a_value_as_one_in_the_order_of_the_ranks() -> None:
    plain, railed = (
        build_algorithm("ring", "all_gather", 64),
        build_algorithm("ring", "all_gather", 64, per_node=8),
    )
    assert len(railed.sweeps) == len(plain.sweeps) == 1
    assert len(railed.sweeps[0].moves) == len(plain.sweeps[0].moves) == 64
