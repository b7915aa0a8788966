"""Ranked algorithms: what groups that lie unevenly over nodes are offered."""

import pytest

from meshwright.predict.collective import find_best_algorithm, rank_algorithms
from meshwright.spec.catalog import get_cluster

H100 = get_cluster("h100-superpod").with_gpus(32)
NBYTES = 64 * 2**20
IN_NODES = {"nvls", "nvls_tree", "sharp", "two_level", "two_level_halving"}


@pytest.mark.parametrize("gpus", [9, 12, 15, 23])
def test_nodes_of_unlike_size_are_not_taken_for_one(gpus: int) -> None:
    names = {one.name for one in rank_algorithms(H100, "all_reduce", NBYTES, members=range(gpus))}
    assert "ring" in names
    assert not names & IN_NODES


def test_ranks_that_alternate_between_nodes_are_not_taken_for_one_node() -> None:
    names = {one.name for one in rank_algorithms(H100, "all_reduce", NBYTES, members=[0, 8, 1, 9])}
    assert not names & IN_NODES


def test_one_rank_per_node_has_no_switch_inside_nodes() -> None:
    found = rank_algorithms(H100, "all_reduce", NBYTES, members=[0, 8])
    assert {one.name for one in found} & IN_NODES == {"sharp"}
    assert not any("nvswitch" in name for one in found for name in one.collective.switches)


@pytest.mark.parametrize("op", ["broadcast", "reduce"])
def test_the_fabric_alone_serves_nodes_of_unlike_size(op: str) -> None:
    found = rank_algorithms(H100, op, NBYTES, members=range(15))  # type: ignore[arg-type]
    assert "sharp" in {one.name for one in found}


@pytest.mark.parametrize("gpus", [10, 14, 15])
def test_fewer_gpus_of_the_last_node_do_not_leave_cards_idle(gpus: int) -> None:
    full = find_best_algorithm(H100, "all_reduce", NBYTES, members=range(16)).seconds
    found = {
        one.name: one for one in rank_algorithms(H100, "all_reduce", NBYTES, members=range(gpus))
    }
    assert found["ring"].channels == gpus - 8
    # A ring passes everything through the cards of the smallest node, nearly twice.
    cards = (gpus - 8) * 50e9
    assert found["ring"].seconds == pytest.approx(2 * (1 - 1 / gpus) * NBYTES / cards, rel=0.1)
    assert min(one.seconds for one in found.values()) > full


def test_sums_are_made_in_the_switches_of_the_nodes_that_take_part() -> None:
    first = rank_algorithms(H100, "all_reduce", NBYTES, members=range(8))
    last = rank_algorithms(H100, "all_reduce", NBYTES, members=range(24, 32))
    assert [(one.name, one.seconds) for one in first] == [(one.name, one.seconds) for one in last]
    nvls = next(one for one in last if one.name == "nvls")
    assert nvls.collective.switches == ("nvswitch3",)
