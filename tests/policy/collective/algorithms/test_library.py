"""Every algorithm of the library is proved for many numbers of ranks, nodes, channels and roots."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.errors import InputError
from meshwright.policy.collective import (
    ALGORITHMS,
    CollectiveOp,
    build_algorithm,
    verify_collective,
)
from meshwright.policy.collective.collective import COLLECTIVE_OPS, ROOTED_OPS

PAIRS = [(each.name, op) for each in ALGORITHMS for op in each.ops]
EQUAL_NODES = {
    "two_level",
    "two_level_halving",
    "three_level",
    "nvls",
    "nvls_tree",
    "sharp",
    "cross_forward",
    "forward_cross",
    "over_rails",
}
SIZES = [*range(2, 18), 24, 31, 32, 64]


def arguments(name: str, op: CollectiveOp, ranks: int, **wished: Any) -> dict[str, Any]:
    """Return what an algorithm needs beside the number of ranks, some of it made up."""
    if op == "all_to_all_v":
        wished["counts"] = [[(3 * s + 5 * d) % 4 for d in range(ranks)] for s in range(ranks)]
    if op == "send_recv":
        wished["peers"] = [(rank + 1) % ranks if rank % 3 else -1 for rank in range(ranks)]
    return wished


def prove(name: str, op: CollectiveOp, ranks: int, **wished: Any) -> None:
    """Build an algorithm and prove it."""
    collective = build_algorithm(name, op, ranks, **arguments(name, op, ranks, **wished))
    proof = verify_collective(collective)
    assert proof.is_correct, proof.problems
    assert proof.same_on_all_ranks
    assert (collective.name, collective.op, collective.ranks) == (name, op, ranks)


def test_every_operation_has_algorithms() -> None:
    assert {op for _, op in PAIRS} == set(COLLECTIVE_OPS)


def test_names_are_unique() -> None:
    names = [each.name for each in ALGORITHMS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("name", "op"), PAIRS)
def test_proved_for_any_number_of_ranks(name: str, op: CollectiveOp) -> None:
    for ranks in (1, *SIZES):
        widths = [w for w in (1, 2, 3, 4, 8) if ranks % w == 0]
        prove(name, op, ranks, per_node=widths[-1], nodes_per_pod=1)


@pytest.mark.parametrize(("name", "op"), PAIRS)
def test_proved_with_channels_and_pieces(name: str, op: CollectiveOp) -> None:
    for ranks in (2, 5, 6, 8, 12):
        per_node = 2 if ranks % 2 == 0 else 1
        options = {"per_node": per_node, "nodes_per_pod": 1}
        for channels, pieces in ((2, None), (3, 2), (1, 5)):
            prove(name, op, ranks, channels=channels, pieces=pieces, **options)


@pytest.mark.parametrize(("name", "op"), PAIRS)
def test_proved_for_nodes_and_pods(name: str, op: CollectiveOp) -> None:
    for per_node, nodes, per_pod in ((4, 3, 3), (3, 4, 2), (8, 8, 4), (2, 15, 5), (5, 1, 1)):
        prove(name, op, per_node * nodes, per_node=per_node, nodes_per_pod=per_pod, channels=2)


@pytest.mark.parametrize(("name", "op"), [pair for pair in PAIRS if pair[1] in ROOTED_OPS])
def test_proved_for_every_root(name: str, op: CollectiveOp) -> None:
    for root in range(12):
        prove(name, op, 12, per_node=4, channels=2, pieces=2, root=root)


@given(data=st.data())
def test_proved_for_whatever_is_asked(data: st.DataObject) -> None:
    name, op = data.draw(st.sampled_from(PAIRS))
    per_node, per_pod = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))
    ranks = per_node * per_pod * data.draw(st.integers(1, 3))
    if name not in EQUAL_NODES:
        ranks += data.draw(st.integers(0, per_node - 1))
    wished: dict[str, Any] = {
        "per_node": per_node,
        "nodes_per_pod": per_pod,
        "channels": data.draw(st.integers(1, 4)),
        "pieces": data.draw(st.none() | st.integers(1, 4)),
        "root": data.draw(st.integers(0, ranks - 1)),
    }
    if name == "ring":
        order = st.permutations(range(ranks))
        wished["orders"] = data.draw(st.none() | st.lists(order, min_size=1, max_size=3))
    if name == "pat":
        wished["aggregate"] = data.draw(st.none() | st.integers(1, 2 * ranks))
    wished = arguments(name, op, ranks, **wished)
    if op == "all_to_all_v":
        row = st.lists(st.integers(0, 3), min_size=ranks, max_size=ranks)
        wished["counts"] = data.draw(st.lists(row, min_size=ranks, max_size=ranks))
    if op == "send_recv":
        peers = data.draw(st.permutations(range(ranks)))
        silent = data.draw(st.sets(st.integers(0, ranks - 1)))
        wished["peers"] = [-1 if r in silent else peer for r, peer in enumerate(peers)]
    proof = verify_collective(build_algorithm(name, op, ranks, **wished))
    assert proof.is_correct, proof.problems
    assert proof.same_on_all_ranks


@pytest.mark.parametrize(
    ("arguments", "where", "says"),
    [
        ({"name": "rings"}, "name", "the library has no algorithm 'rings'"),
        ({"op": "all_to_all"}, "op", "ring is no algorithm for 'all_to_all'"),
        ({"ranks": 0}, "ranks", "is 0"),
        ({"channels": 0}, "channels", "is 0"),
        ({"channels": -3}, "channels", "is -3"),
        ({"channels": 10**30}, "channels", "channels are more than 16,777,216"),
        ({"name": "chain", "pieces": 10**12}, "pieces", "4 ranks × 1,000,000,000,000 pieces"),
        ({"ranks": 10**12}, "ranks", "1,000,000,000,000 ranks are more than 16,777,216"),
        pytest.param({"ranks": 10**6}, "sweeps", "1,999,998 steps in all", marks=pytest.mark.slow),
        (
            {"name": "pairwise", "op": "all_to_all_v", "ranks": 1, "counts": [[2**31]]},
            "counts",
            "2147483648 chunks in all",
        ),
        ({"op": "broadcast", "root": 4}, "root", "there is no rank 4 among 4"),
        ({"orders": [[0, 1, 2, 2]]}, "order", "does not name each of 4 ranks once"),
        ({"aggregate": 2}, "aggregate", "ring for all_reduce does not use it"),
        ({"name": "two_level"}, "per_node", "is needed by this algorithm"),
        ({"name": "two_level", "per_node": 3}, "per_node", "4 ranks do not fill nodes of 3"),
        (
            {"name": "three_level", "per_node": 1, "nodes_per_pod": 3},
            "nodes_per_pod",
            "4 nodes do not fill pods of 3",
        ),
        ({"name": "direct", "op": "send_recv"}, "peers", "is needed by this algorithm"),
        (
            {"name": "direct", "op": "send_recv", "peers": [1, 1, 2, 3]},
            "peers",
            "rank 1 receives from two ranks",
        ),
        (
            {"name": "pairwise", "op": "all_to_all_v", "counts": [[1, 2]]},
            "counts",
            "1 × 2 counts for 4 ranks",
        ),
    ],
)
def test_what_cannot_be_built_is_refused_with_a_fix(
    arguments: dict[str, Any], where: str, says: str
) -> None:
    wished: dict[str, Any] = {"name": "ring", "op": "all_reduce", "ranks": 4} | arguments
    with pytest.raises(InputError) as refusal:
        build_algorithm(**wished)
    problem = refusal.value.problems[0]
    assert problem.where == where
    assert says in problem.what
    assert problem.fix


def test_the_refusal_of_an_operation_names_algorithms_that_do_it() -> None:
    with pytest.raises(InputError, match="another algorithm for all_to_all: bruck, pairwise"):
        build_algorithm("ring", "all_to_all", 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "op", "options"),
    [
        ("ring", "all_reduce", {}),
        ("ring", "reduce_scatter", {"per_node": 8}),
        ("halving_doubling", "all_reduce", {}),
        ("two_level", "all_gather", {"per_node": 8}),
        ("double_tree", "all_reduce", {"per_node": 8}),
        ("pat", "all_gather", {}),
        ("pairwise", "all_to_all", {}),
        ("one_shot", "all_reduce", {}),
    ],
)
def test_4096_ranks_are_a_small_value_and_proved(
    name: str, op: CollectiveOp, options: dict[str, Any]
) -> None:
    collective = build_algorithm(name, op, 4096, **options)
    assert sum(len(sweep.moves) for sweep in collective.sweeps) < 200_000
    assert verify_collective(collective).is_correct
