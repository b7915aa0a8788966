"""Steps and bytes of the algorithms are those that their papers and textbooks state."""

from fractions import Fraction
from math import ceil, log2

import pytest

from meshwright.policy.collective import CollectiveOp, build_algorithm
from tests.policy.collective.traffic import Edge, busy_steps, edges, sent_by

ALL = [2, 3, 4, 5, 7, 8, 12, 16, 31]
POWERS = [2, 4, 8, 16, 32]


@pytest.mark.parametrize("n", ALL)
def test_ring_all_reduce_takes_2_n_minus_1_steps_and_2_n_minus_1_nths(n: int) -> None:
    ring = build_algorithm("ring", "all_reduce", n, channels=2)
    assert ring.steps == 2 * (n - 1)
    assert sent_by(ring) == [Fraction(2 * (n - 1), n)] * n


@pytest.mark.parametrize("n", ALL)
@pytest.mark.parametrize("op", ["reduce_scatter", "all_gather"])
def test_half_a_ring_takes_half(n: int, op: CollectiveOp) -> None:
    ring = build_algorithm("ring", op, n)
    assert ring.steps == n - 1
    assert sent_by(ring) == [Fraction(n - 1, n)] * n


@pytest.mark.parametrize("n", ALL)
@pytest.mark.parametrize("op", ["broadcast", "reduce"])
def test_a_chain_of_p_pieces_takes_n_minus_2_plus_p_steps(n: int, op: CollectiveOp) -> None:
    assert build_algorithm("chain", op, n, pieces=7).steps == n - 2 + 7


@pytest.mark.parametrize("n", POWERS)
def test_rabenseifner_takes_2_log_n_steps_and_the_bytes_of_a_ring(n: int) -> None:
    halving = build_algorithm("halving_doubling", "all_reduce", n)
    assert halving.steps == 2 * log2(n)
    assert sent_by(halving) == [Fraction(2 * (n - 1), n)] * n


@pytest.mark.parametrize("n", [3, 5, 6, 7, 12, 31])
def test_folding_costs_two_steps_and_one_message_each_way(n: int) -> None:
    halving, inner = build_algorithm("halving_doubling", "all_reduce", n), 1 << (n.bit_length() - 1)
    assert halving.steps == 2 * log2(inner) + 2
    assert min(sent_by(halving)) == 1
    assert max(sent_by(halving)) == Fraction(2 * (inner - 1), inner) + 1


@pytest.mark.parametrize("n", POWERS)
def test_recursive_doubling_sends_the_message_log_n_times(n: int) -> None:
    doubling = build_algorithm("recursive_doubling", "all_reduce", n)
    assert busy_steps(doubling) == log2(n)
    assert sent_by(doubling) == [Fraction(int(log2(n)))] * n


@pytest.mark.parametrize("n", ALL)
@pytest.mark.parametrize("name", ["bruck", "pat"])
def test_all_gather_in_log_n_steps_sends_no_more_than_a_ring(name: str, n: int) -> None:
    gather = build_algorithm(name, "all_gather", n)
    assert gather.steps == ceil(log2(n))
    assert sent_by(gather) == [Fraction(n - 1, n)] * n


@pytest.mark.parametrize("n", ALL)
def test_bruck_sends_a_chunk_once_per_bit_of_its_distance(n: int) -> None:
    swap = build_algorithm("bruck", "all_to_all", n)
    assert busy_steps(swap) == ceil(log2(n))
    bits = sum(bin(distance).count("1") for distance in range(n))
    assert sent_by(swap) == [Fraction(bits, n)] * n


@pytest.mark.parametrize(("aggregate", "steps"), [(1, 15), (2, 8), (4, 5), (8, 4), (64, 4)])
def test_pat_needs_fewer_steps_the_more_it_aggregates(aggregate: int, steps: int) -> None:
    for op in ("all_gather", "reduce_scatter"):
        pat = build_algorithm("pat", op, 16, aggregate=aggregate)
        assert pat.steps == steps
        largest = max(len(moves.split_by_slot().table) // 16 for _, moves in pat.iterate_steps())
        assert largest == min(aggregate, 8)


def test_pat_sends_to_the_farthest_first() -> None:
    first = next(moves for _, moves in build_algorithm("pat", "all_gather", 16).iterate_steps())
    assert set((first.dst - first.src) % 16) == {8}


@pytest.mark.parametrize("n", ALL)
def test_binomial_trees_take_log_n_steps(n: int) -> None:
    for op in ("broadcast", "reduce", "gather", "scatter"):
        tree = build_algorithm("binomial", op, n, root=n // 2)
        assert tree.steps == ceil(log2(n))
    assert sum(sent_by(build_algorithm("binomial", "broadcast", n))) == n - 1


@pytest.mark.parametrize("n", ALL)
def test_scatter_and_all_gather_sends_about_two_messages(n: int) -> None:
    spread = build_algorithm("scatter_all_gather", "broadcast", n, root=1)
    assert spread.steps == ceil(log2(n)) + n - 1
    assert max(sent_by(spread)) <= 2


@pytest.mark.parametrize("n", ALL)
def test_one_shot_sends_everything_to_everybody_and_two_shots_a_share_twice(n: int) -> None:
    assert sent_by(build_algorithm("one_shot", "all_reduce", n)) == [Fraction(n - 1)] * n
    assert sent_by(build_algorithm("two_shot", "all_reduce", n)) == [Fraction(2 * (n - 1), n)] * n


@pytest.mark.parametrize("n", ALL)
def test_pairwise_exchange_sends_every_chunk_once(n: int) -> None:
    swap = build_algorithm("pairwise", "all_to_all", n)
    assert busy_steps(swap) == n - 1
    assert set(edges(swap).values()) == {1}


@pytest.mark.parametrize("name", ["two_level", "two_level_halving", "nvls"])
@pytest.mark.parametrize(("per_node", "nodes"), [(2, 4), (4, 8), (8, 2)])
def test_two_levels_send_a_node_th_of_a_ring_between_nodes(
    name: str, per_node: int, nodes: int
) -> None:
    n = per_node * nodes
    tiers = build_algorithm(name, "all_reduce", n, per_node=per_node)

    def between(edge: Edge) -> bool:
        return max(edge) < n and edge[0] // per_node != edge[1] // per_node

    assert sent_by(tiers, between) == [Fraction(2 * (nodes - 1), nodes * per_node)] * n
    assert all(s % per_node == d % per_node for s, d in filter(between, edges(tiers)))


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_switch_takes_each_message_once_and_each_share_back(n: int) -> None:
    assert sent_by(build_algorithm("nvls", "all_reduce", n)) == [1 + Fraction(1, n)] * n
    assert sent_by(build_algorithm("sharp", "all_reduce", n)) == [Fraction(1)] * n


@pytest.mark.parametrize("name", ["cross_forward", "forward_cross"])
@pytest.mark.parametrize("op", ["all_to_all", "all_to_all_v"])
def test_hierarchical_exchange_crosses_once_and_on_rails(name: str, op: CollectiveOp) -> None:
    per_node, n = 4, 12
    counts = [[1] * n for _ in range(n)] if op == "all_to_all_v" else None
    swap = build_algorithm(name, op, n, per_node=per_node, counts=counts)
    crossing = {
        (src, dst): chunks
        for (src, dst), chunks in edges(swap).items()
        if src // per_node != dst // per_node
    }
    assert all(src % per_node == dst % per_node for src, dst in crossing)
    assert crossing == {
        (src, dst): per_node
        for src in range(n)
        for dst in range(src % per_node, n, per_node)
        if src // per_node != dst // per_node
    }


@pytest.mark.parametrize("root", [0, 5])
def test_weights_cross_into_each_node_once_over_all_cards(root: int) -> None:
    spread = build_algorithm("over_rails", "broadcast", 12, per_node=4, root=root)
    into = [Fraction(0)] * 12
    for (src, dst), chunks in edges(spread).items():
        if src // 4 != dst // 4:
            assert src % 4 == dst % 4
            into[dst] += Fraction(chunks, spread.chunks)
    home = root // 4
    assert into == [Fraction(0 if rank // 4 == home else 1, 4) for rank in range(12)]
