"""Ranks compare their jobs: all are refused with the same words, or none is."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from meshwright.errors import InputError, MeshwrightError, Problem
from meshwright.run.parallel.launch import config_consensus
from meshwright.run.parallel.launch.config_consensus import (
    MissingRanksError,
    check_config_consensus,
    name_ranks,
)

Job = dict[str, object]
JOB: Job = {"optimizer.lr": 1e-3, "seed": 1}


def ends(
    jobs: list[Job | None], wrong: Mapping[int, Problem] | None = None
) -> list[MeshwrightError | None]:
    """Let ranks compare jobs, each in a thread; None is one that does not come.

    `wrong` is what some of them have found.
    """
    store, found = HashStore(), wrong or {}

    def compare(rank: int) -> MeshwrightError | None:
        job = jobs[rank]
        try:
            if job is not None:
                rendezvous_timeout_s, own = (
                    2 if None in jobs else 60,
                    [found[rank]] if rank in found else [],
                )
                check_config_consensus(
                    store,
                    rank,
                    len(jobs),
                    job,
                    problems=own,
                    rendezvous_timeout_s=rendezvous_timeout_s,
                )
        except MeshwrightError as error:
            return error
        return None

    with ThreadPoolExecutor(len(jobs)) as pool:
        return list(pool.map(compare, range(len(jobs))))


def test_equal_jobs_agree() -> None:
    assert ends([JOB, dict(reversed(JOB.items())), JOB]) == [None, None, None]


def test_a_value_that_differs_is_named_with_its_ranks_to_all_of_them() -> None:
    found = ends([JOB, {**JOB, "optimizer.lr": 3e-4}, JOB, {**JOB, "optimizer.lr": 3e-4}])
    assert all(isinstance(one, InputError) for one in found)
    assert {str(one) for one in found} == {
        "job: ranks 1, 3 have another job than rank 0: optimizer.lr is 0.0003 there and 0.001 "
        "on rank 0 (fix: give every rank the same file and flags)"
    }


def test_values_that_only_one_side_has_are_named() -> None:
    (first, _) = ends([JOB, {"seed": 1, "loss.z_loss_coeff": 2}])
    assert "loss.z_loss_coeff is 2 there and not set on rank 0" in str(first)
    assert "optimizer.lr is not set there and 0.001 on rank 0" in str(first)


def test_a_rank_that_does_not_come_is_named_to_those_that_did() -> None:
    found = ends([JOB, None, JOB])
    assert isinstance(found[0], MissingRanksError)
    assert str(found[0]) == str(found[2]) == "rank 1 of 3 did not join within 2 s"


WRONG = Problem("layout.tp", "3 does not divide the 4 heads", "use 2")


def test_what_one_rank_has_found_is_told_to_all() -> None:
    found = ends([JOB, JOB, JOB], {1: WRONG, 2: WRONG})
    assert {str(one) for one in found} == {f"ranks 1, 2: {WRONG}"}


def test_what_all_have_found_is_told_once() -> None:
    found = ends([JOB, JOB], {0: WRONG, 1: WRONG})
    assert {str(one) for one in found} == {str(WRONG)}


def test_what_a_rank_has_found_is_told_to_those_that_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_consensus, "REJECT_WAIT_S", 0.2)
    found = ends([JOB, None, JOB], {2: WRONG})
    assert str(found[0]) == str(found[2]) == f"rank 2: {WRONG}"


def test_a_rank_that_is_there_already_is_refused_and_disturbs_nobody() -> None:
    store = HashStore()
    check_config_consensus(store, 0, 1, JOB)
    before = store.get("verdict")
    with pytest.raises(InputError, match="there is another rank 0 where these meet"):
        check_config_consensus(store, 0, 1, {**JOB, "seed": 2})
    assert store.get("verdict") == before


def test_the_verdict_of_a_smaller_job_at_the_same_place_does_not_count() -> None:
    store = HashStore()
    check_config_consensus(store, 0, 1, JOB)
    with pytest.raises(InputError, match="there is another rank 1 where these meet"):
        check_config_consensus(store, 1, 2, JOB)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([1, 2, 3, 7], "ranks 1–3, 7"), ([0, 2, 4], "ranks 0, 2, 4")],
)
def test_ranks_are_named_shortly(ranks: list[int], text: str) -> None:
    assert name_ranks(ranks) == text
