"""Placements differ in which nodes they take; all take the whole gang or nothing."""

import pytest

from meshwright.errors import InputError
from meshwright.policy.job_queue import (
    JobRequest,
    NodePool,
    NodeSpec,
    QueuedJob,
    make_uniform_nodes,
)


def job(index: int, gpus: float, **more: object) -> QueuedJob:
    return QueuedJob(index, JobRequest(job_id=str(index), submit_s=0.0, gpus=gpus, **more))  # type: ignore[arg-type]


def filled(placing: str, *sizes: int, domain: int | None = None, nodes: int = 4) -> NodePool:
    pool = NodePool(make_uniform_nodes(8 * nodes, 8, per_domain=domain), placing)
    for node, gpus in enumerate(sizes):
        pool.free_gpus[node] -= gpus
        pool.free -= gpus
    return pool


@pytest.mark.parametrize(
    ("placing", "gpus", "place"),
    [
        ("first-fit", 2, ((0, 2),)),
        ("best-fit", 2, ((1, 2),)),
        ("pack", 4, ((1, 2), (0, 2))),
        ("spread", 2, ((3, 2),)),
        ("consolidate", 4, ((0, 4),)),
        ("consolidate", 8, ((3, 8),)),
        ("consolidate", 16, None),
        ("best-fit", 16, ((3, 8), (0, 4), (2, 4))),
    ],
)
def test_each_takes_the_nodes_it_is_for(
    placing: str, gpus: int, place: tuple[tuple[int, int], ...] | None
) -> None:
    pool = filled(placing, 4, 6, 4, 0)  # free: 4, 2, 4, 8
    one = job(0, gpus)
    free = pool.free
    assert pool.allocate(one) == (place is not None)
    assert one.placement == place
    assert pool.free == free - (gpus if place else 0)
    if place:
        pool.release(one)
    assert pool.free_gpus == [4, 2, 4, 8]


def test_topology_keeps_a_gang_on_one_switch_where_it_can() -> None:
    pool = filled("topology", 4, 0, 0, 0, domain=2)
    one = job(0, 16)
    assert pool.allocate(one)
    assert {node for node, _ in one.placement} == {2, 3}
    two = job(1, 12)
    assert pool.allocate(two)
    assert {node for node, _ in two.placement} == {0, 1}


def test_kinds_cores_and_drained_nodes_are_minded() -> None:
    nodes = [NodeSpec(gpus=8, gpu_kind="a", cpus=64), NodeSpec(gpus=8, gpu_kind="b", cpus=16)]
    pool = NodePool(nodes, "best-fit")
    assert not pool.allocate(job(0, 9, gpu_kinds=("a",)))
    one = job(1, 2, gpu_kinds=("b",), cpus=16.0)
    assert pool.allocate(one)
    assert one.placement == ((1, 2),)
    assert not pool.allocate(job(2, 1, gpu_kinds=("b",), cpus=1.0))
    pool.drain(0)
    assert pool.free == 6
    assert not pool.allocate(job(3, 7))
    pool.resume(0)
    assert pool.allocate(job(3, 7))


def test_parts_of_gpus_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="whole ones"):
        filled("pack").allocate(job(0, 0.5))
    with pytest.raises(InputError, match="do not fill nodes"):
        make_uniform_nodes(12, 8)
