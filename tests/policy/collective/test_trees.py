"""Double binary trees: what is a leaf in one is inside the other, and both are shallow."""

from math import ceil, log2

import pytest

from meshwright.policy.collective import build_algorithm
from meshwright.policy.collective.algorithms.tree import (
    ParentList,
    build_complement_tree,
    build_in_order_tree,
    list_depths,
    list_upward_steps,
)
from tests.policy.collective.traffic import sent_by

SIZES = [*range(2, 40), 64, 100, 1024]


def children(tree: ParentList) -> list[int]:
    """Return how many children each rank has."""
    return [tree.count(rank) for rank in range(len(tree))]


@pytest.mark.parametrize("n", SIZES)
def test_both_trees_are_binary_and_log_deep(n: int) -> None:
    for tree in (build_in_order_tree(n), build_complement_tree(n)):
        assert tree.count(-1) == 1
        assert tree[0] == -1
        assert max(children(tree)) <= 2
        assert max(list_depths(tree)) <= ceil(log2(n))


@pytest.mark.parametrize("n", SIZES)
def test_no_rank_has_children_in_both_trees(n: int) -> None:
    both = zip(children(build_in_order_tree(n)), children(build_complement_tree(n)), strict=True)
    assert all(one == 0 or other == 0 for one, other in list(both)[1:])


def test_nccl_s_tree_of_8() -> None:
    """As NCCL's `ncclGetBtree` documents it: 0 → 4; 4 → 2, 6; 2 → 1, 3; 6 → 5, 7."""
    assert build_in_order_tree(8) == (-1, 2, 4, 2, 0, 6, 4, 6)


@pytest.mark.parametrize("n", [4, 7, 16])
def test_two_trees_share_the_load_that_one_puts_on_its_inner_ranks(n: int) -> None:
    assert max(sent_by(build_algorithm("binary_tree", "all_reduce", n))) == 3
    assert max(sent_by(build_algorithm("double_tree", "all_reduce", n))) <= 2


@pytest.mark.parametrize("n", SIZES)
def test_children_of_a_rank_take_turns(n: int) -> None:
    tree = build_in_order_tree(n)
    at = list_upward_steps(tree)
    for rank in range(n):
        turns = [at[child] for child in range(n) if tree[child] == rank]
        assert len(set(turns)) == len(turns)
        assert all(turn < at[rank] for turn in turns)


def test_pieces_stream_so_that_more_of_them_add_one_step_each() -> None:
    few, many = (build_algorithm("double_tree", "all_reduce", 64, pieces=p).steps for p in (4, 40))
    assert many - few == 36


def test_inside_nodes_trees_are_chains_and_only_one_gpu_per_lane_crosses() -> None:
    tree = build_algorithm("double_tree", "all_reduce", 32, per_node=8, channels=4)
    doors: dict[int, set[int]] = {}
    for _, moves in tree.iterate_steps():
        for src, dst, *_, channel, _ in moves.table.tolist():
            if src // 8 != dst // 8:
                doors.setdefault(channel, set()).update((src % 8, dst % 8))
    assert doors == {lane: {lane} for lane in range(8)}
