"""Who is to blame, read from the rows of the ledger alone."""

import pytest

from meshwright.run.parallel.collective.progress_table import (
    NO_VALUE,
    PlanPosition,
    ProgressState,
    RankProgress,
)
from meshwright.run.parallel.collective.stall_diagnosis import (
    STALL_CAUSES,
    StallSnapshot,
    diagnose_stall,
)

NAMES = "ring all_reduce of 8 float32"


def row(
    state: ProgressState = ProgressState.ENTERED,
    *,
    sequence: int = 7,
    signature: int = 1,
    last: int = NO_VALUE,
    awaited: int | None = None,
    blamed: int = NO_VALUE,
) -> RankProgress:
    """Return the row of a rank that waits for the rank `awaited`, if any."""
    spot = None if awaited is None else PlanPosition(3, 5, "receive", awaited)
    return RankProgress(
        pid=100,
        process_start=0,
        state=state,
        sequence=sequence,
        signature=signature,
        tasks_done=0,
        last_task=last,
        heartbeat_ns=0,
        waiting_for=spot,
        blamed_rank=blamed,
        stall_cause=STALL_CAUSES.index("no_heartbeat"),
        collective_name=NAMES,
    )


def scene(
    entries: list[RankProgress], *, dead: set[int] | None = None, silent: set[int] | None = None
) -> StallSnapshot:
    return StallSnapshot(
        0,
        entries,
        frozenset(dead or ()),
        frozenset(silent or ()),
        lambda rank, task: PlanPosition(rank + 10, task + 20, "local", rank),
        5.0,
    )


def test_chain_of_waiting_leads_to_the_rank_that_waits_for_nobody() -> None:
    stall = diagnose_stall(scene([row(awaited=1), row(awaited=2), row(last=0)]))
    assert (stall.blamed_rank, stall.cause) == (2, "stuck")
    assert [(one.rank, one.position.peer) for one in stall.wait_chain] == [(0, 1), (1, 2)]


def test_dead_rank_is_blamed_at_the_step_and_chunk_it_had_come_to() -> None:
    stall = diagnose_stall(scene([row(awaited=1), row(awaited=0, last=0)], dead={1}))
    assert (stall.blamed_rank, stall.cause) == (1, "dead")
    assert stall.position is not None
    assert (stall.position.step, stall.position.chunk) == (3, 5)
    assert "at step 3, chunk 5 (receive from rank 0)" in stall.message
    assert "the last it did was step 11, chunk 20" in stall.message


def test_rank_held_up_in_an_earlier_collective_is_not_blamed_but_whom_it_waits_for() -> None:
    entries = [row(awaited=1), row(sequence=6, awaited=2), row(sequence=6, last=0)]
    stall = diagnose_stall(scene(entries, dead={2}))
    assert (stall.blamed_rank, stall.cause) == (2, "dead")
    assert "of collective 6" in stall.message


def test_rank_that_gave_up_and_ended_is_not_taken_for_the_dead_one() -> None:
    entries = [
        row(awaited=1),
        row(ProgressState.ABORTED, awaited=2),
        row(ProgressState.NOT_ENTERED, sequence=6),
    ]
    stall = diagnose_stall(scene(entries, dead={1}))
    assert (stall.blamed_rank, stall.cause) == (2, "absent")


@pytest.mark.parametrize(
    ("other", "why", "said"),
    [
        (
            row(ProgressState.NOT_ENTERED, sequence=6),
            "absent",
            "has not arrived; its last was collective 6",
        ),
        (row(ProgressState.ENTERED, sequence=6), "absent", "is still in collective 6"),
        (row(ProgressState.ENTERED, sequence=8), "other_collective", "has gone on to collective 8"),
        (
            row(ProgressState.ENTERED, signature=2),
            "other_collective",
            "runs another collective under this number",
        ),
        (row(ProgressState.NOT_ENTERED), "finished", "has finished its part"),
    ],
)
def test_rank_that_is_not_here_is_told_apart(other: RankProgress, why: str, said: str) -> None:
    stall = diagnose_stall(scene([row(awaited=1), other]))
    assert (stall.blamed_rank, stall.cause) == (1, why)
    assert said in stall.message


def test_rank_that_waits_but_no_longer_looks_around_is_silent() -> None:
    stall = diagnose_stall(scene([row(awaited=1), row(awaited=0)], silent={1}))
    assert (stall.blamed_rank, stall.cause) == (1, "no_heartbeat")


def test_rank_that_went_on_to_the_next_collective_is_not_blamed_for_a_stuck_one() -> None:
    stall = diagnose_stall(scene([row(awaited=1), row(last=0), row(sequence=8)]))
    assert (stall.blamed_rank, stall.cause) == (1, "stuck")


def test_circle_is_called_a_circle() -> None:
    assert diagnose_stall(scene([row(awaited=1), row(awaited=0)])).cause == "circle"


def test_rank_that_others_gave_up_on_is_told_that_it_is_late() -> None:
    stall = diagnose_stall(scene([row(awaited=1), row(ProgressState.ABORTED, awaited=0, blamed=0)]))
    assert (stall.blamed_rank, stall.cause) == (0, "late")


def test_rank_that_woke_up_since_is_still_the_one_that_was_to_blame() -> None:
    entries = [row(awaited=1), row(awaited=2), row(ProgressState.ABORTED, awaited=1, blamed=1)]
    stall = diagnose_stall(scene(entries))
    assert (stall.blamed_rank, stall.cause) == (1, "no_heartbeat")
