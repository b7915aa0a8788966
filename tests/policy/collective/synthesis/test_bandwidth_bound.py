import itertools
import random

import pytest

from meshwright.errors import InputError
from meshwright.policy.collective.synthesis import find_bandwidth_bound
from meshwright.spec.cluster.link_graph import LinkGraph
from tests.policy.collective.synthesis.machines import drawn, mesh, star


@pytest.mark.parametrize("gpus", [2, 3, 5, 8])
def test_all_gather_in_a_full_mesh_is_bound_by_what_one_gpu_receives(gpus: int) -> None:
    bound = find_bandwidth_bound(mesh(gpus, 10e9), "all_gather")
    assert bound.rate_bytes_per_s == pytest.approx(gpus * 10e9)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_all_reduce_around_a_switch_is_bound_by_two_passes_less_one_share(gpus: int) -> None:
    bound = find_bandwidth_bound(star([450e9] * gpus), "all_reduce")
    assert bound.rate_bytes_per_s == pytest.approx(450e9 * gpus / (2 * (gpus - 1)))


def test_all_reduce_needs_no_root_at_a_slow_gpu() -> None:
    # Its contribution goes out once and the sum comes in once, so its link is filled each way.
    bound = find_bandwidth_bound(star([1e9, *[10e9] * 7]), "all_reduce")
    assert bound.rate_bytes_per_s == pytest.approx(1e9)


def test_broadcast_is_bound_by_the_narrowest_cut_around_its_root() -> None:
    line = drawn(3, {(0, 1): 10e9, (1, 2): 4e9})
    assert find_bandwidth_bound(line, "broadcast").rate_bytes_per_s == pytest.approx(4e9)
    assert find_bandwidth_bound(line, "reduce", root=2).rate_bytes_per_s == pytest.approx(4e9)
    assert find_bandwidth_bound(line, "broadcast", ("gpu0", "gpu1")).rate_bytes_per_s == 10e9


def test_the_binding_cut_is_named() -> None:
    # Two pairs joined by one thin link.
    graph = drawn(4, {(0, 1): 100e9, (2, 3): 100e9, (1, 2): 5e9})
    bound = find_bandwidth_bound(graph, "all_gather")
    assert set(bound.cut_partition[0]) in ({"gpu0", "gpu1"}, {"gpu2", "gpu3"})
    assert bound.crossing_bytes_per_s == 5e9
    assert bound.rate_bytes_per_s == pytest.approx(10e9)
    whole = find_bandwidth_bound(graph, "all_reduce")
    assert {frozenset(part) for part in whole.cut_partition} == {
        frozenset({"gpu0", "gpu1"}),
        frozenset({"gpu2", "gpu3"}),
    }


@pytest.mark.parametrize("missing", [{(0, 1)}, {(0, 1), (2, 3)}, {(0, 1), (0, 2), (3, 4)}])
def test_all_gather_bound_is_the_least_over_every_cut(missing: set[tuple[int, int]]) -> None:
    graph = mesh(5, 10e9, missing)
    assert find_bandwidth_bound(graph, "all_gather").rate_bytes_per_s == pytest.approx(
        min(5 * _leaving(graph, side) / len(side) for side in _sides(5))
    )


@pytest.mark.parametrize("missing", [set(), {(0, 1)}, {(0, 1), (0, 2), (3, 4)}])
def test_all_reduce_bound_is_the_least_over_every_division(missing: set[tuple[int, int]]) -> None:
    graph = mesh(5, 10e9, missing)
    least = min(
        sum(_leaving(graph, part) for part in parts) / (2 * (len(parts) - 1))
        for parts in _divisions(list(range(5)))
        if len(parts) > 1
    )
    assert find_bandwidth_bound(graph, "all_reduce").rate_bytes_per_s == pytest.approx(least)


@pytest.mark.parametrize("seed", range(12))
def test_bounds_hold_for_links_of_any_rate(seed: int) -> None:
    chance = random.Random(seed)
    rates = {
        (a, b): chance.choice([1, 2, 3, 7, 12.5, 31.5]) * 1e9
        for a, b in itertools.combinations(range(5), 2)
        if b == a + 1 or chance.random() < 0.5
    }
    graph = drawn(5, rates)
    cut = min(5 * _leaving(graph, side) / len(side) for side in _sides(5))
    division = min(
        sum(_leaving(graph, part) for part in parts) / (2 * (len(parts) - 1))
        for parts in _divisions(list(range(5)))
        if len(parts) > 1
    )
    assert find_bandwidth_bound(graph, "all_gather").rate_bytes_per_s == pytest.approx(cut)
    assert find_bandwidth_bound(graph, "all_reduce").rate_bytes_per_s == pytest.approx(division)


def test_an_operation_without_trees_is_refused() -> None:
    with pytest.raises(InputError, match="no trees carry out 'all_to_all'"):
        find_bandwidth_bound(mesh(4), "all_to_all")


def _sides(gpus: int) -> list[tuple[int, ...]]:
    sizes = range(1, gpus)
    return [side for size in sizes for side in itertools.combinations(range(gpus), size)]


def _leaving(graph: LinkGraph, side: tuple[int, ...]) -> float:
    names = {f"gpu{rank}" for rank in side}
    return sum(
        link.link_bytes_per_s
        for link in graph.links
        if link.source in names and link.target not in names
    )


def _divisions(ranks: list[int]) -> list[list[tuple[int, ...]]]:
    if not ranks:
        return [[]]
    first, rest = ranks[0], ranks[1:]
    found = []
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            left = [rank for rank in rest if rank not in others]
            found += [[(first, *others), *parts] for parts in _divisions(left)]
    return found
