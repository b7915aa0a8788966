"""How much of a cluster can be given away: jobs come one after another, and none leaves.

Sampled jobs follow the recorded ones until they ask for a multiple of all GPUs. What is given away
when nothing more fits tells how well a placement packs (Weng et al., ATC 2023).
"""

import random
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from meshwright.errors import InputError
from meshwright.policy.queue.ask import Ask, Standing
from meshwright.policy.queue.fragmentation import Fragments, descend
from meshwright.policy.queue.nodes import Node
from meshwright.policy.queue.scoring import AtRandom, BestFit, Clustering, DotProduct, Packing
from meshwright.policy.queue.slices import Scorer, Slices, by_count, shape_of
from meshwright.spec.names import unknown_name

SCORERS: dict[str, type[Scorer] | None] = {
    "random": AtRandom,
    "dot-product": DotProduct,
    "clustering": Clustering,
    "packing": Packing,
    "best-fit": BestFit,
    "fragmentation": None,
}
"""Placements on shared GPUs; fragmentation is made for the jobs that are typical."""


class Packed(msgspec.Struct, frozen=True, kw_only=True):
    """What became of jobs that came and stayed."""

    arrived: NDArray[np.float64]
    """GPUs asked for up to each job, over all GPUs."""
    given: NDArray[np.float64]
    """GPUs given away by then, over all GPUs."""
    refused: int
    """Jobs that found no room."""
    fragments: float
    """Share of all GPUs that is free at the end and of no use to typical jobs."""

    def given_at(self, arrived: float) -> float:
        """Return what is given away when so much has been asked for."""
        at = int(np.searchsorted(self.arrived, arrived, side="right")) - 1
        return float(self.given[max(0, min(at, len(self.given) - 1))])


def scorer_for(name: str, asks: Sequence[Ask]) -> type[Scorer]:
    """Return a placement by name, made for these jobs where it has to be."""
    if name not in SCORERS:
        raise InputError([unknown_name("placement", name, list(SCORERS), "placement")])
    found = SCORERS[name]
    return descend(by_count(map(shape_of, asks))) if found is None else found


def pack(
    nodes: Sequence[Node], asks: Sequence[Ask], placing: str, *, ratio: float = 1.3, seed: int = 0
) -> Packed:
    """Place jobs in random order, more of their like after them, up to `ratio` of all GPUs.

    Of nodes that score alike the first is taken, so nodes stand in random order too: that of a list
    (all of one kind together, say) would be part of the result.
    """
    listed = random.Random(seed).sample(nodes, len(nodes))
    pool = Slices(listed, scorer_for(placing, asks), seed=seed)
    arrived, given, refused, sum_gpus = [], [], 0, 0.0
    for at, ask in enumerate(arrivals(asks, ratio * pool.total, seed)):
        sum_gpus += ask.gpus
        refused += not pool.take(Standing(at, ask))
        arrived.append(sum_gpus / pool.total)
        given.append(1 - pool.free / pool.total)
    lost = Fragments(by_count(map(shape_of, asks)), pool).amounts(pool.left, pool.cpus, pool.kind)
    return Packed(
        arrived=np.array(arrived),
        given=np.array(given),
        refused=refused,
        fragments=float(lost.sum()) / 1000 / pool.total,
    )


def arrivals(asks: Sequence[Ask], gpus: float, seed: int) -> list[Ask]:
    """Return the jobs in random order, with as many drawn from them as it takes to ask for `gpus`.

    Where the jobs alone ask for more, some are left out.
    """
    draw = random.Random(seed)
    found = list(asks)
    draw.shuffle(found)
    asked = sum(ask.gpus for ask in found)
    while asked > gpus:
        asked -= found.pop(draw.randrange(len(found))).gpus
    while True:
        ask = asks[draw.randrange(len(asks))]
        if asked + ask.gpus > gpus:
            return found
        found.append(ask)
        asked += ask.gpus
