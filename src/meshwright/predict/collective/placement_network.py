"""A `Placement` as a `SimNetwork`: equal units with one way out, at the speeds that NCCL reaches.

Rings and trees of all channels are alike on such a network, so one of them with the speed of all
stands for them. Wires are therefore summed up: a GPU has one link into its unit and one out of it,
a unit has one to the network and one back.
"""

import numpy as np

from meshwright.policy.collective.algorithms.in_network import FABRIC
from meshwright.predict.collective.sim_network import NO_LINK, Floats, Longs, RouteTable, SimNetwork
from meshwright.predict.network.placement import Placement


def build_placement_network(
    place: Placement,
    *,
    gpu_bytes_per_s: float,
    unit_bytes_per_s: float,
    post_bytes_per_s: float = float("inf"),
) -> SimNetwork:
    """Return the network of a group whose ranks fill its units one after the other.

    `post_bytes_per_s` is the rate at which one GPU can hand messages to its network card.
    """
    ranks, units, width = place.ranks, place.domains, place.ranks_per_domain
    fabric = ranks + units
    rates: Floats = np.concatenate(
        [
            np.full(2 * ranks, gpu_bytes_per_s),
            np.full(2 * units, unit_bytes_per_s),
            np.full(ranks, post_bytes_per_s),
        ]
    )
    up, down = 2 * ranks, 2 * ranks + units
    post = 2 * ranks + 2 * units
    unit_of = np.concatenate([np.arange(ranks) // width, np.arange(units), [-1]])

    def routes(source: Longs, target: Longs) -> RouteTable:
        unit_a, unit_b = unit_of[source], unit_of[target]
        crosses = unit_a != unit_b
        near = (source != target) & ~crosses
        out, into = near & (source < ranks), near & (target < ranks)
        links = np.column_stack(
            [
                np.where(out, source, NO_LINK),
                np.where(into, ranks + target, NO_LINK),
                np.where(crosses & (source < fabric), up + unit_a, NO_LINK),
                np.where(crosses & (target < fabric), down + unit_b, NO_LINK),
                np.where(crosses & (source < ranks), post + source, NO_LINK),
            ]
        )
        return RouteTable(links)

    def link_name(link: int) -> str:
        if link < 2 * ranks:
            return f"gpu{link}→unit" if link < ranks else f"unit→gpu{link - ranks}"
        if link < post:
            number = (link - up) % units
            return f"unit{number}→network" if link < down else f"network→unit{number}"
        return f"gpu{link - post}→card"

    return SimNetwork(
        name=f"{units} × {width} ranks",
        gpus=ranks,
        switches=[*(f"nvswitch{unit}" for unit in range(units)), FABRIC],
        domains=unit_of,
        link_bytes_per_s=rates,
        latency_s=np.zeros(len(rates)),
        link_name=link_name,
        routes=routes,
    )
