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
from meshwright.policy.job_queue.job import JobRequest, QueuedJob
from meshwright.policy.job_queue.pool.fragmentation import FragmentationMeter, make_fgd_scorer
from meshwright.policy.job_queue.pool.node_pool import NodeSpec
from meshwright.policy.job_queue.pool.scorers import (
    BestFitScorer,
    ClusteringScorer,
    DotProductScorer,
    PackingScorer,
    RandomScorer,
)
from meshwright.policy.job_queue.pool.shared_pool import (
    NodeScorer,
    SharedGpuPool,
    find_typical_shapes,
    make_shape,
)
from meshwright.spec.name_suggestions import build_unknown_name_problem

SCORERS: dict[str, type[NodeScorer] | None] = {
    "random": RandomScorer,
    "dot-product": DotProductScorer,
    "clustering": ClusteringScorer,
    "packing": PackingScorer,
    "best-fit": BestFitScorer,
    "fragmentation": None,
}
"""Placements on shared GPUs; fragmentation is made for the jobs that are typical."""


class PackingOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of jobs that came and stayed."""

    requested_fraction: NDArray[np.float64]
    """GPUs asked for up to each job, over all GPUs."""
    allocated_fraction: NDArray[np.float64]
    """GPUs given away by then, over all GPUs."""
    rejected: int
    """Jobs that found no room."""
    fragmented_fraction: float
    """Share of all GPUs that is free at the end and of no use to typical jobs."""

    def allocated_fraction_at(self, arrived: float) -> float:
        """Return what is given away when so much has been asked for."""
        at = int(np.searchsorted(self.requested_fraction, arrived, side="right")) - 1
        return float(self.allocated_fraction[max(0, min(at, len(self.allocated_fraction) - 1))])


def make_scorer(name: str, asks: Sequence[JobRequest]) -> type[NodeScorer]:
    """Return a placement by name, made for these jobs where it has to be."""
    if name not in SCORERS:
        raise InputError(
            [build_unknown_name_problem("placement", name, list(SCORERS), "placement")]
        )
    found = SCORERS[name]
    return make_fgd_scorer(find_typical_shapes(map(make_shape, asks))) if found is None else found


def pack_cluster(
    nodes: Sequence[NodeSpec],
    asks: Sequence[JobRequest],
    placing: str,
    *,
    ratio: float = 1.3,
    seed: int = 0,
) -> PackingOutcome:
    """Place jobs in random order, more of their like after them, up to `ratio` of all GPUs.

    Of nodes that score alike the first is taken, so nodes stand in random order too: that of a list
    (all of one kind together, say) would be part of the result.
    """
    listed = random.Random(seed).sample(nodes, len(nodes))
    pool = SharedGpuPool(listed, make_scorer(placing, asks), seed=seed)
    arrived, given, refused, sum_gpus = [], [], 0, 0.0
    for at, ask in enumerate(sample_arrivals(asks, ratio * pool.total, seed)):
        sum_gpus += ask.gpus
        refused += not pool.allocate(QueuedJob(at, ask))
        arrived.append(sum_gpus / pool.total)
        given.append(1 - pool.free / pool.total)
    lost = FragmentationMeter(find_typical_shapes(map(make_shape, asks)), pool).measure(
        pool.free_thousandths, pool.cpus, pool.kind
    )
    return PackingOutcome(
        requested_fraction=np.array(arrived),
        allocated_fraction=np.array(given),
        rejected=refused,
        fragmented_fraction=float(lost.sum()) / 1000 / pool.total,
    )


def sample_arrivals(asks: Sequence[JobRequest], gpus: float, seed: int) -> list[JobRequest]:
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
