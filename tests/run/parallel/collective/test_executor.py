"""Collectives on real processes: equal to torch.distributed, bit by bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshwright.policy.collective.collective import COLLECTIVE_OPS, CollectiveOp
from meshwright.run.parallel.collective.communicator import Transport
from meshwright.run.parallel.launch.rank_spawner import spawn_ranks
from tests.run.parallel.collective.battery import (
    DTYPES,
    MORE_DTYPES,
    Verdict,
    add_random_numbers,
    compare_with_native,
    reduce_otherwise,
)

SIZES = (1, 1000, 5003)
"""Fewer elements than chunks, several frames, and a size that nothing divides."""


def faults(ranks: int, function: Callable[..., list[Verdict]], *args: Any) -> list[str]:
    """Run cases on real processes; return what was wrong, and make sure that there were cases."""
    answers: list[list[Verdict]] = spawn_ranks(ranks, function, *args, timeout_s=150)
    assert len(answers) == ranks
    assert all(answers)
    return [
        f"rank {rank}: {one.case}: {one.fault}"
        for rank, verdicts in enumerate(answers)
        for one in verdicts
        if one.fault
    ]


@pytest.mark.parametrize(
    ("ranks", "transport"),
    [
        (2, "shm"),
        pytest.param(4, "shm", marks=pytest.mark.slow),
        pytest.param(3, "torch", marks=pytest.mark.slow),
    ],
)
def test_every_algorithm_equals_torch_bit_by_bit(ranks: int, transport: Transport) -> None:
    sizes = SIZES if transport == "shm" else SIZES[1:2]
    assert not faults(ranks, compare_with_native, COLLECTIVE_OPS, sizes, DTYPES[:2], transport)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "torch"])
@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_algorithm_and_type_equals_torch(ranks: int, transport: Transport) -> None:
    sizes = SIZES if transport == "shm" else SIZES[1:2]
    assert not faults(ranks, compare_with_native, COLLECTIVE_OPS, sizes, DTYPES, transport)


@pytest.mark.parametrize("transport", ["shm", "torch"])
def test_every_type_of_number_is_added_exactly(transport: Transport) -> None:
    ops: tuple[CollectiveOp, ...] = ("reduce_scatter",)
    kinds: tuple[torch.dtype, ...] = (torch.int64, *MORE_DTYPES)
    assert not faults(2, compare_with_native, ops, (999,), kinds, transport)


@pytest.mark.parametrize("transport", ["shm", pytest.param("torch", marks=pytest.mark.slow)])
def test_random_numbers_add_up_and_are_the_same_on_all_ranks(transport: Transport) -> None:
    assert not faults(4, add_random_numbers, transport)


def test_averages_and_extremes_are_taken() -> None:
    assert not faults(3, reduce_otherwise, "shm")


def test_one_rank_alone_gets_its_own_input() -> None:
    assert not faults(1, compare_with_native, ("all_reduce", "all_gather"), (10,), DTYPES, "auto")
