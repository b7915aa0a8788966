"""Ranks compare their jobs: all are refused with the same words, or none is."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from meshwright.errors import InputError, MeshwrightError
from meshwright.run.parallel.launch.agreement import RanksMissing, agree, ranked

Job = dict[str, object]
JOB: Job = {"optimizer.lr": 1e-3, "seed": 1}


def ends(jobs: list[Job | None]) -> list[MeshwrightError | None]:
    """Let ranks compare jobs, each in a thread; None is one that does not come."""
    store = HashStore()

    def compare(rank: int) -> MeshwrightError | None:
        job = jobs[rank]
        try:
            if job is not None:
                agree(store, rank, len(jobs), job, meet_s=2 if None in jobs else 60)
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
        "job: ranks 1 and 3 have another job than rank 0: optimizer.lr is 0.0003 there and 0.001 "
        "on rank 0 (fix: give every rank the same file and flags)"
    }


def test_values_that_only_one_side_has_are_named() -> None:
    (first, _) = ends([JOB, {"seed": 1, "loss.z": 2}])
    assert "loss.z is 2 there and not set on rank 0" in str(first)
    assert "optimizer.lr is not set there and 0.001 on rank 0" in str(first)


def test_a_rank_that_does_not_come_is_named_to_those_that_did() -> None:
    found = ends([JOB, None, JOB])
    assert isinstance(found[0], RanksMissing)
    assert str(found[0]) == str(found[2]) == "rank 1 of 3 did not come within 2 s"


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([3], "rank 3"), ([1, 2, 3, 7], "ranks 1-3 and 7"), ([0, 2, 4], "ranks 0, 2 and 4")],
)
def test_ranks_are_named_shortly(ranks: list[int], text: str) -> None:
    assert ranked(ranks) == text
