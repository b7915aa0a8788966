"""Placements differ in which nodes they take; all take the whole gang or nothing."""

import pytest

from meshwright.errors import InputError
from meshwright.policy.queue import Ask, Node, Nodes, Standing, even_nodes


def job(index: int, gpus: float, **more: object) -> Standing:
    return Standing(index, Ask(job=str(index), submit_s=0.0, gpus=gpus, **more))  # type: ignore[arg-type]


def filled(placing: str, *sizes: int, domain: int | None = None, nodes: int = 4) -> Nodes:
    pool = Nodes(even_nodes(8 * nodes, 8, per_domain=domain), placing)
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
    assert pool.take(one) == (place is not None)
    assert one.place == place
    assert pool.free == free - (gpus if place else 0)
    if place:
        pool.give(one)
    assert pool.free_gpus == [4, 2, 4, 8]


def test_topology_keeps_a_gang_on_one_switch_where_it_can() -> None:
    pool = filled("topology", 4, 0, 0, 0, domain=2)
    one = job(0, 16)
    assert pool.take(one)
    assert {node for node, _ in one.place} == {2, 3}
    two = job(1, 12)
    assert pool.take(two)
    assert {node for node, _ in two.place} == {0, 1}


def test_kinds_cores_and_drained_nodes_are_minded() -> None:
    nodes = [Node(gpus=8, kind="a", cpus=64), Node(gpus=8, kind="b", cpus=16)]
    pool = Nodes(nodes, "best-fit")
    assert not pool.take(job(0, 9, kinds=("a",)))
    one = job(1, 2, kinds=("b",), cpus=16.0)
    assert pool.take(one)
    assert one.place == ((1, 2),)
    assert not pool.take(job(2, 1, kinds=("b",), cpus=1.0))
    pool.shut(0)
    assert pool.free == 6
    assert not pool.take(job(3, 7))
    pool.open(0)
    assert pool.take(job(3, 7))


def test_parts_of_gpus_are_refused_by_name() -> None:
    with pytest.raises(InputError, match="whole ones"):
        filled("pack").take(job(0, 0.5))
    with pytest.raises(InputError, match="do not fill nodes"):
        even_nodes(12, 8)
