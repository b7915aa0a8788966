"""Shares of GPUs: what fits where, what is fragmented, and what each score prefers."""

import numpy as np
import pytest

from meshwright.policy.job_queue import JobRequest, NodeSpec, QueuedJob
from meshwright.policy.job_queue.pool.fragmentation import FragmentationMeter, make_fgd_scorer
from meshwright.policy.job_queue.pool.scorers import (
    BestFitScorer,
    ClusteringScorer,
    DotProductScorer,
    PackingScorer,
    RandomScorer,
)
from meshwright.policy.job_queue.pool.shared_pool import (
    NodeScorer,
    ResourceShape,
    SharedGpuPool,
    find_typical_shapes,
    make_shape,
)

NODES = [
    NodeSpec(gpus=2, gpu_kind="a", cpus=16),
    NodeSpec(gpus=4, gpu_kind="b", cpus=16),
    NodeSpec(gpus=4, gpu_kind="b", cpus=64),
]
HALF = ResourceShape(500, 1, 4.0, 0.0, ())
WHOLE = ResourceShape(1000, 1, 4.0, 0.0, ())


def job(index: int, gpus: float, cpus: float = 1.0, kinds: tuple[str, ...] = ()) -> QueuedJob:
    return QueuedJob(
        index, JobRequest(job_id=str(index), submit_s=0.0, gpus=gpus, cpus=cpus, gpu_kinds=kinds)
    )


@pytest.mark.parametrize(
    "scorer",
    [
        RandomScorer,
        BestFitScorer,
        DotProductScorer,
        PackingScorer,
        ClusteringScorer,
        make_fgd_scorer([(HALF, 1.0)]),
    ],
)
def test_no_gpu_is_given_beyond_itself_and_all_comes_back(scorer: type[NodeScorer]) -> None:
    pool, draw = SharedGpuPool(NODES, scorer, seed=1), np.random.default_rng(0)
    jobs, gone = [], 0
    for index in range(300):
        gpus = float(draw.choice([0, 0.1, 0.25, 0.5, 0.7, 1, 2, 4]))
        one = job(index, gpus, float(draw.integers(1, 4)))
        if pool.allocate(one):
            jobs.append(one)
        else:
            gone += 1
        assert (pool.free_thousandths >= 0).all()
        assert (pool.cpus >= 0).all()
        assert pool.free == pytest.approx(pool.free_thousandths.sum() / 1000)
        if len(jobs) > 15:
            pool.release(jobs.pop(int(draw.integers(len(jobs)))))
    assert gone
    for one in jobs:
        pool.release(one)
    assert pool.free_thousandths.sum() == 10_000
    assert pool.free == pytest.approx(10)
    assert pool.jobs_by_node == [{}, {}, {}]


def test_a_part_goes_to_the_gpu_with_least_to_spare() -> None:
    pool = SharedGpuPool(NODES, BestFitScorer)
    first, second, third = job(0, 0.5), job(1, 0.7, kinds=("b",)), job(2, 0.3)
    assert all(pool.allocate(one) for one in (first, second, third))
    assert third.placement[0] == first.placement[0] == 0
    assert third.placement[2] == first.placement[2]
    assert second.placement[0] in (1, 2)


def test_fragments_are_what_typical_jobs_cannot_use() -> None:
    pool = SharedGpuPool(NODES, RandomScorer)
    pool.free_thousandths[1] = [400, 400, 0, 1000]
    pool.cpus[2] = 1.0
    both = FragmentationMeter([(HALF, 0.5), (WHOLE, 0.5)], pool)
    found = both.measure(pool.free_thousandths, pool.cpus, pool.kind)
    # Node 0 serves both; node 1 loses two remainders; node 2 has no cores left for anybody.
    assert found.tolist() == [0, 800, 4000]


def test_descent_leaves_whole_gpus_to_those_who_need_them() -> None:
    typical = [(HALF, 0.5), (ResourceShape(1000, 4, 4.0, 0.0, ()), 0.5)]
    pool = SharedGpuPool(NODES, make_fgd_scorer(typical))
    one = job(0, 0.5)
    assert pool.allocate(one)
    assert one.placement[0] == 0  # the node that no large job could use anyway


def test_common_shapes_make_up_what_is_typical() -> None:
    asks = [
        JobRequest(job_id=str(at), submit_s=0, gpus=1 if at % 4 else 0.5, memory_bytes=at)
        for at in range(96)
    ]
    asks += [JobRequest(job_id="rare", submit_s=0, gpus=8)]
    found = find_typical_shapes(map(make_shape, asks), coverage=0.95)
    assert [(shape.gpu_thousandths, shape.gpus) for shape, _ in found] == [(1000, 1), (500, 1)]
    assert [share for _, share in found] == pytest.approx([0.75, 0.25])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scorer", [BestFitScorer, DotProductScorer])
def test_nodes_whose_cores_nobody_tells_are_scored_by_gpus(scorer: type[NodeScorer]) -> None:
    pool = SharedGpuPool([NodeSpec(gpus=8), NodeSpec(gpus=4)], scorer)
    scores = pool.scorer.score_nodes(ResourceShape(1000, 2, 0.0, 0.0, ()), np.array([0, 1]))
    assert 0 < scores[0] < scores[1] <= 100
