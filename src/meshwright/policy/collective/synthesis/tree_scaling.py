"""`scale_to_trees`: the fewest trees that come close to the bound, and the links counted in trees.

A link that carries b bytes per second carries floor(U·b) trees of 1/U bytes per second each. For a
number of trees, the smallest U at which they still fit gives their rate; the first number whose
rate is near enough to the bound is taken, so that a message is cut into few chunks.
"""

from collections.abc import Callable
from typing import NamedTuple

from meshwright.policy.collective.collective import CollectiveOp
from meshwright.policy.collective.synthesis.bandwidth_bound import add_source, find_min_root_rates
from meshwright.policy.collective.synthesis.capacity_network import CapacityNetwork
from meshwright.policy.collective.synthesis.max_flow import ResidualGraph

ROUNDING_TOLERANCE = 0.02
"""What rounding to whole trees may cost."""
MAX_TREES_PER_GPU = 8
"""Trees from each GPU at which the search for a near enough number ends."""
MAX_TREES = 64
"""The same for trees whose roots are free, or one."""

_HOPELESS = 1000
"""A part of the bound that is not worth a schedule."""

IntMatrix = list[list[int]]


class TreeCapacity(NamedTuple):
    """A network whose links are counted in trees."""

    capacity: IntMatrix
    """Trees that fit from one vertex to the next, in the direction in which they spread."""
    trees_by_root: list[int]
    """Trees that begin at each GPU."""
    tree_bytes_per_s: float
    """What one tree carries."""


def scale_to_trees(
    network: CapacityNetwork, op: CollectiveOp, root: int, rate_bytes_per_s: float
) -> TreeCapacity | None:
    """Return the network in whole trees for an operation whose bound is known.

    None where links that carry less in one direction leave no trees to use both ways.
    """
    rates = network.capacity
    if op == "all_reduce":
        rates = {arc: min(rate, network.get_reverse_rate(arc)) for arc, rate in rates.items()}
    matrix = network.to_matrix(rates, op in ("reduce_scatter", "reduce"))
    gpus = network.gpus
    if op in ("all_gather", "reduce_scatter"):
        return _search(matrix, _same_roots(gpus), rate_bytes_per_s / gpus, MAX_TREES_PER_GPU)
    most = max(MAX_TREES, MAX_TREES_PER_GPU * gpus // 2)
    if op == "all_reduce":
        # Every tree is used twice, to sum towards its root and back: each way gets half.
        half = [[rate / 2 for rate in row] for row in matrix]
        return _search(half, _free_roots(gpus), rate_bytes_per_s, most)
    return _search(matrix, _one_root(gpus, root), rate_bytes_per_s, most)


def _search(
    matrix: list[list[float]],
    fits: Callable[[IntMatrix, int], list[int] | None],
    ideal: float,
    most: int,
) -> TreeCapacity | None:
    best: TreeCapacity | None = None
    best_stretch = float("inf")
    for trees in range(1, most + 1):
        # Only a number of trees that beats the best so far is worth a search of its own.
        high = (
            1 + ROUNDING_TOLERANCE if best is None else best_stretch * (1 - ROUNDING_TOLERANCE / 2)
        )
        while fits(_whole(matrix, high * trees / ideal), trees) is None:
            if best is not None:
                high = 0.0
                break
            high *= 2
            if high > _HOPELESS:
                return None
        if not high:
            continue
        low = 1.0
        if fits(_whole(matrix, trees / ideal), trees) is not None:
            high = low
        while high - low > ROUNDING_TOLERANCE / 8:
            middle = (low + high) / 2
            if fits(_whole(matrix, middle * trees / ideal), trees) is None:
                low = middle
            else:
                high = middle
        capacity = _whole(matrix, high * trees / ideal)
        roots = fits(capacity, trees)
        assert roots is not None
        best, best_stretch = TreeCapacity(capacity, roots, ideal / (high * trees)), high
        if best_stretch <= 1 + ROUNDING_TOLERANCE:
            break
    return best


def _whole(matrix: list[list[float]], trees_per_rate: float) -> IntMatrix:
    # The small addition keeps 6.9999999 from becoming 6.
    return [[int(trees_per_rate * rate + 1e-6) for rate in row] for row in matrix]


def find_root_flows(capacity: IntMatrix, roots: list[int], gpus: int) -> list[ResidualGraph] | None:
    """Return for each GPU a flow of all trees from their roots to it; None if one gets too few.

    By Edmonds' theorem trees with these roots that reach all GPUs exist exactly if these flows do.
    """
    size, demand = len(capacity), sum(roots)
    rows = add_source([[*row] for row in capacity], [*roots])
    found = []
    unfed = ResidualGraph(rows)
    for sink in range(gpus):
        fed = unfed.copy()
        if fed.send_flow(size, sink, demand) < demand:
            return None
        found.append(fed)
    return found


def _same_roots(gpus: int) -> Callable[[IntMatrix, int], list[int] | None]:
    def fits(capacity: IntMatrix, trees: int) -> list[int] | None:
        roots = [trees] * gpus
        return None if find_root_flows(capacity, roots, gpus) is None else roots

    return fits


def _one_root(gpus: int, root: int) -> Callable[[IntMatrix, int], list[int] | None]:
    def fits(capacity: IntMatrix, trees: int) -> list[int] | None:
        roots = [trees if gpu == root else 0 for gpu in range(gpus)]
        return None if find_root_flows(capacity, roots, gpus) is None else roots

    return fits


def _free_roots(gpus: int) -> Callable[[IntMatrix, int], list[int] | None]:
    def fits(capacity: IntMatrix, trees: int) -> list[int] | None:
        roots, _ = find_min_root_rates([[*row] for row in capacity], gpus, trees, 0, floor=0)
        whole = [int(count) for count in roots]
        return whole if sum(whole) == trees else None

    return fits
