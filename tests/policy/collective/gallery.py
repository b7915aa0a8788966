"""Small collectives of every algorithm in the library, for tests that go through all of them."""

from collections.abc import Iterator
from typing import Any

from meshwright.policy.collective import ALGORITHMS, Collective, build_algorithm
from meshwright.policy.collective.collective import ROOTED_OPS

_NODES = {"three_level": {"per_node": 2, "nodes_per_pod": 2}}


def gallery(sizes: tuple[int, ...] = (2, 3, 4, 6, 8)) -> Iterator[Collective]:
    """Go through every algorithm and operation over small numbers of ranks."""
    for algorithm in ALGORITHMS:
        for op in algorithm.ops:
            for ranks in sizes:
                wished: dict[str, Any] = {"channels": 1 + ranks % 2}
                if "nodes_per_pod" in algorithm.needs and ranks != 8:
                    continue
                if "per_node" in algorithm.needs or algorithm.name in ("nvls_tree", "sharp"):
                    if ranks % 2:
                        continue
                    wished.update(_NODES.get(algorithm.name, {"per_node": ranks // 2}))
                if op in ROOTED_OPS:
                    wished["root"] = ranks // 2
                if op == "all_to_all_v":
                    wished["counts"] = [
                        [(s + 2 * d) % 3 for d in range(ranks)] for s in range(ranks)
                    ]
                if op == "send_recv":
                    wished["peers"] = [(rank + 1) % ranks for rank in range(ranks)]
                yield build_algorithm(algorithm.name, op, ranks, **wished)


def label(collective: Collective) -> str:
    """Name a collective in a test's output."""
    return f"{collective.name}-{collective.op}-{collective.ranks}"
