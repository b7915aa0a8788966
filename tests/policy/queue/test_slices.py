"""Shares of GPUs: what fits where, what is fragmented, and what each score prefers."""

import numpy as np
import pytest

from meshwright.policy.queue import Ask, Node, Standing
from meshwright.policy.queue.fragmentation import Fragments, descend
from meshwright.policy.queue.scoring import AtRandom, BestFit, Clustering, DotProduct, Packing
from meshwright.policy.queue.slices import Scorer, Shape, Slices, by_count, shape_of

NODES = [
    Node(gpus=2, kind="a", cpus=16),
    Node(gpus=4, kind="b", cpus=16),
    Node(gpus=4, kind="b", cpus=64),
]
HALF = Shape(500, 1, 4.0, 0.0, ())
WHOLE = Shape(1000, 1, 4.0, 0.0, ())


def job(index: int, gpus: float, cpus: float = 1.0, kinds: tuple[str, ...] = ()) -> Standing:
    return Standing(index, Ask(job=str(index), submit_s=0.0, gpus=gpus, cpus=cpus, kinds=kinds))


@pytest.mark.parametrize(
    "scorer", [AtRandom, BestFit, DotProduct, Packing, Clustering, descend([(HALF, 1.0)])]
)
def test_no_gpu_is_given_beyond_itself_and_all_comes_back(scorer: type[Scorer]) -> None:
    pool, draw = Slices(NODES, scorer, seed=1), np.random.default_rng(0)
    jobs, gone = [], 0
    for index in range(300):
        gpus = float(draw.choice([0, 0.1, 0.25, 0.5, 0.7, 1, 2, 4]))
        one = job(index, gpus, float(draw.integers(1, 4)))
        if pool.take(one):
            jobs.append(one)
        else:
            gone += 1
        assert (pool.left >= 0).all()
        assert (pool.cpus >= 0).all()
        assert pool.free == pytest.approx(pool.left.sum() / 1000)
        if len(jobs) > 15:
            pool.give(jobs.pop(int(draw.integers(len(jobs)))))
    assert gone
    for one in jobs:
        pool.give(one)
    assert pool.left.sum() == 10_000
    assert pool.free == pytest.approx(10)
    assert pool.guests == [{}, {}, {}]


def test_a_part_goes_to_the_gpu_with_least_to_spare() -> None:
    pool = Slices(NODES, BestFit)
    first, second, third = job(0, 0.5), job(1, 0.7, kinds=("b",)), job(2, 0.3)
    assert all(pool.take(one) for one in (first, second, third))
    assert third.place[0] == first.place[0] == 0
    assert third.place[2] == first.place[2]
    assert second.place[0] in (1, 2)


def test_fragments_are_what_typical_jobs_cannot_use() -> None:
    pool = Slices(NODES, AtRandom)
    pool.left[1] = [400, 400, 0, 1000]
    pool.cpus[2] = 1.0
    both = Fragments([(HALF, 0.5), (WHOLE, 0.5)], pool)
    found = both.amounts(pool.left, pool.cpus, pool.kind)
    # Node 0 serves both; node 1 loses two remainders; node 2 has no cores left for anybody.
    assert found.tolist() == [0, 800, 4000]


def test_descent_leaves_whole_gpus_to_those_who_need_them() -> None:
    typical = [(HALF, 0.5), (Shape(1000, 4, 4.0, 0.0, ()), 0.5)]
    pool = Slices(NODES, descend(typical))
    one = job(0, 0.5)
    assert pool.take(one)
    assert one.place[0] == 0  # the node that no large job could use anyway


def test_common_shapes_make_up_what_is_typical() -> None:
    asks = [Ask(job=str(at), submit_s=0, gpus=1 if at % 4 else 0.5, memory=at) for at in range(96)]
    asks += [Ask(job="rare", submit_s=0, gpus=8)]
    found = by_count(map(shape_of, asks), coverage=0.95)
    assert [(shape.part, shape.gpus) for shape, _ in found] == [(1000, 1), (500, 1)]
    assert [share for _, share in found] == pytest.approx([0.75, 0.25])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("scorer", [BestFit, DotProduct])
def test_nodes_whose_cores_nobody_tells_are_scored_by_gpus(scorer: type[Scorer]) -> None:
    pool = Slices([Node(gpus=8), Node(gpus=4)], scorer)
    scores = pool.scorer.scores(Shape(1000, 2, 0.0, 0.0, ()), np.array([0, 1]))
    assert 0 < scores[0] < scores[1] <= 100
