"""A rank that dies, sleeps or strays is named by all others within seconds."""

import signal
from collections.abc import Callable
from typing import Any

import pytest

from meshwright.errors import MissingDependency
from meshwright.run.parallel.collective import CollectiveStallError
from meshwright.run.parallel.collective.communicator import Transport
from meshwright.run.parallel.launch.rank_spawner import (
    RankResult,
    spawn_ranks,
    spawn_ranks_with_results,
)
from tests.run.parallel.collective.misfortunes import (
    PATIENCE_S,
    VICTIM,
    brings_another_size,
    dies_on_another_host,
    goes_on_after_a_stall,
    never_comes,
    oversleeps,
    oversleeps_on_another_host,
    signalled_mid_way,
    strays,
)

RANKS = 3
BOTH = pytest.mark.parametrize("transport", ["shm", "torch"])


def suffered(function: Callable[..., Any], *args: Any) -> list[RankResult]:
    return spawn_ranks_with_results(RANKS, function, *args, timeout_s=30)


def stalls(outcomes: list[RankResult]) -> list[CollectiveStallError]:
    """Return what the ranks raised that did not fail themselves."""
    found = []
    for rank, outcome in enumerate(outcomes):
        if rank != VICTIM:
            assert isinstance(outcome.error, CollectiveStallError), (rank, outcome)
            found.append(outcome.error)
    return found


@BOTH
def test_killed_rank_is_named_with_its_step_and_chunk(transport: Transport) -> None:
    outcomes = suffered(signalled_mid_way, transport, signal.SIGKILL)
    assert outcomes[VICTIM].exit_code == -signal.SIGKILL
    for error in stalls(outcomes):
        assert (error.stall.blamed_rank, error.stall.cause) == (VICTIM, "dead")
        assert "rank 1 is dead" in str(error)


@BOTH
def test_stopped_rank_is_named(transport: Transport) -> None:
    outcomes = suffered(signalled_mid_way, transport, signal.SIGSTOP)
    for error in stalls(outcomes):
        assert error.stall.blamed_rank == VICTIM
        assert error.stall.cause in (
            "no_heartbeat",
            "stuck",
            "absent",
            "late",
        )  # by where it was stopped


@BOTH
def test_rank_that_comes_too_late_is_named_and_told(transport: Transport) -> None:
    answers = spawn_ranks(RANKS, oversleeps, transport, timeout_s=30)
    for rank in {0, 1, 2} - {VICTIM}:
        stall, waited_s = answers[rank]
        assert (stall.blamed_rank, stall.cause) == (VICTIM, "absent")
        assert waited_s < PATIENCE_S + 4
        assert {one.rank for one in stall.wait_chain} == {0, 2}
    assert answers[VICTIM] is not None


@BOTH
def test_rank_that_runs_another_collective_is_named_with_it(transport: Transport) -> None:
    outcomes = suffered(strays, transport)
    for error in stalls(outcomes):
        assert (error.stall.blamed_rank, error.stall.cause) == (VICTIM, "other_collective")
        assert "chain broadcast" in str(error)
    assert isinstance(outcomes[VICTIM].error, CollectiveStallError)
    assert "ring all_reduce" in str(outcomes[VICTIM].error)


def test_unequal_sizes_are_refused_by_all_naming_the_rank_and_the_team_lives_on() -> None:
    for said in spawn_ranks(RANKS, brings_another_size, "shm", timeout_s=30):
        assert "rank 1: calls ring all_reduce of 2,000 float32" in said
        assert "0, 2 ring all_reduce of 1,000 float32" in said


def test_rank_that_died_before_the_first_collective_is_named() -> None:
    for error in stalls(suffered(never_comes, "shm")):
        assert (error.stall.blamed_rank, error.stall.cause) == (VICTIM, "dead")


@pytest.mark.slow
def test_team_that_gave_up_says_so_and_does_nothing_more() -> None:
    answers = spawn_ranks(RANKS, goes_on_after_a_stall, "shm", timeout_s=30)
    assert "make a new process group" in answers[0]


def test_rank_that_dies_on_another_host_is_named() -> None:
    for error in stalls(suffered(dies_on_another_host, "torch")):
        assert error.stall.blamed_rank == VICTIM
        assert error.stall.cause in ("no_heartbeat", "absent")  # by where it had come to


@pytest.mark.slow
def test_rank_that_is_late_on_another_host_is_named() -> None:
    answers = spawn_ranks(RANKS, oversleeps_on_another_host, "torch", timeout_s=30)
    for rank in {0, 1, 2} - {VICTIM}:
        stall, waited_s = answers[rank]
        assert (stall.blamed_rank, stall.cause) == (VICTIM, "absent")
        assert waited_s < PATIENCE_S + 4


def test_shared_memory_is_refused_where_ranks_are_on_several_hosts() -> None:
    for outcome in suffered(oversleeps_on_another_host, "shm"):
        assert isinstance(outcome.error, MissingDependency)
