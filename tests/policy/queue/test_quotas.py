"""Teams use their own, lend what they leave, and get it back when they want it."""

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.policy.queue import Ask, Counted, Moves, Pool, Quota, Standing
from meshwright.policy.queue.quotas import Quotas
from meshwright.predict.queue import simulate
from tests.policy.queue.drawn import TEAMS, drawn


def job(index: int, team: str, gpus: float) -> Standing:
    return Standing(index, Ask(job=str(index), submit_s=0.0, gpus=gpus, team=team))


def test_what_others_leave_is_borrowed_up_to_the_limit() -> None:
    queue = Quotas({"a": Quota(gpus=4, borrows=2), "b": Quota(gpus=8)})
    pool = Counted(12)
    for index in range(4):
        queue.arrives(job(index, "a", 2), 0)
    assert len(queue.decide(0, pool).starts) == 3
    assert queue.used == {"a": 6, "b": 0}


def test_what_is_not_lent_is_not_borrowed() -> None:
    queue = Quotas({"a": Quota(gpus=4), "b": Quota(gpus=8, lends=2)})
    pool = Counted(12)
    for index in range(4):
        queue.arrives(job(index, "a", 2), 0)
    assert len(queue.decide(0, pool).starts) == 3


@pytest.mark.parametrize("reclaim", [True, False])
def test_owners_get_their_own_back(reclaim: bool) -> None:
    queue, pool = Quotas({"a": Quota(gpus=4), "b": Quota(gpus=4)}, reclaim=reclaim), Counted(8)
    for index in range(4):
        queue.arrives(job(index, "a", 2), 0)
    queue.decide(0, pool)
    queue.arrives(job(9, "b", 4), 1)
    moves = queue.decide(1, pool)
    assert [one.index for one in moves.starts] == ([9] if reclaim else [])
    assert sorted(one.index for one in moves.stops) == ([2, 3] if reclaim else [])


class Minding(Quotas):
    """Quotas that fail where a team waits for its own while another borrows."""

    def decide(self, now_s: float, pool: Pool) -> Moves:
        moves = super().decide(now_s, pool)
        borrowed = any(self.used[team] > quota.gpus for team, quota in self.quotas.items())
        for one in self.waiting.values():
            own = self.quotas[one.ask.team].gpus - self.used[one.ask.team]
            assert not (borrowed and one.gpus <= own)
        return moves


@pytest.mark.parametrize("seed", range(4))
def test_nobody_waits_for_its_own_while_others_borrow(seed: int) -> None:
    asks, run_s = drawn(seed, 100, most=8)
    ran = simulate(asks, run_s, Counted(24), Minding({team: Quota(gpus=8) for team in TEAMS}))
    assert np.isfinite(ran.end_s).all()


def test_a_team_without_quota_is_named() -> None:
    with pytest.raises(InputError, match="team 'c' has no quota"):
        Quotas({"a": Quota(gpus=4)}).arrives(job(0, "c", 1), 0)
