import random
from collections import Counter

import pytest

from meshwright.policy.collective.synthesis.edge_splitting import split_off_switches
from meshwright.policy.collective.synthesis.max_flow import ResidualGraph
from meshwright.policy.collective.synthesis.tree_packing import pack_trees
from meshwright.policy.collective.synthesis.tree_scaling import TreeCapacity, find_root_flows


def test_flow_is_what_the_narrowest_cut_carries() -> None:
    fed = ResidualGraph([[0, 3, 2, 0], [0, 0, 5, 2], [0, 0, 0, 3], [0, 0, 0, 0]])
    assert fed.send_flow(0, 3, 100) == 5
    assert fed.source_side(0) & 1 << 3 == 0


@pytest.mark.parametrize("seed", range(8))
def test_trees_span_all_and_overfill_no_link(seed: int) -> None:
    chance = random.Random(seed)
    gpus = chance.randint(3, 6)
    capacity = [[0] * gpus for _ in range(gpus)]
    for a in range(gpus):
        for b in range(gpus):
            if a != b:
                capacity[a][b] = chance.randint(0, 3)
    roots = [0] * gpus
    # As many trees as still leave every GPU fed, one root after the other.
    for turn in range(4 * gpus):
        more = [count + (rank == turn % gpus) for rank, count in enumerate(roots)]
        roots = more if find_root_flows(capacity, more, gpus) is not None else roots
    trees = pack_trees(capacity, roots)
    used: Counter[tuple[int, int]] = Counter()
    for tree in trees:
        assert sorted([tree.root, *(child for _, child in tree.edges)]) == list(range(gpus))
        used.update(dict.fromkeys(tree.edges, tree.weight))
    assert all(times <= capacity[u][t] for (u, t), times in used.items())
    began = Counter(dict.fromkeys(range(gpus), 0))
    for tree in trees:
        began[tree.root] += tree.weight
    assert [began[rank] for rank in range(gpus)] == roots


def test_a_switch_becomes_links_that_feed_as_many_trees() -> None:
    # Four GPUs with three trees' worth of link each, around a switch.
    capacity = [[0] * 5 for _ in range(5)]
    for gpu in range(4):
        capacity[gpu][4] = capacity[4][gpu] = 3
    between = split_off_switches(TreeCapacity(capacity, [1] * 4, 1.0), 4, {})
    assert between is not None
    assert [sum(row) for row in between] == [3] * 4
    assert find_root_flows(between, [1] * 4, 4) is not None
    assert find_root_flows(between, [2] * 4, 4) is None
