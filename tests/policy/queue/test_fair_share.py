"""Teams come to their shares, and usage fades."""

import pytest

from meshwright.policy.queue import Ask, Counted
from meshwright.policy.queue.fair_share import FairShare, Usage, Weights
from meshwright.predict.queue import simulate


def test_usage_halves_in_its_half_life_and_grows_while_gpus_are_held() -> None:
    usage = Usage(half_life_s=100)
    usage.change("a", 2, 0)
    usage.change("a", -2, 50)
    first = usage.used["a"]
    assert 0 < first < 100
    usage.pass_to(150)
    assert usage.used["a"] == pytest.approx(first / 2)


@pytest.mark.parametrize("shares", [{"a": 3.0, "b": 1.0}, {"a": 1.0, "b": 1.0}])
def test_shares_converge_where_both_teams_want_everything(shares: dict[str, float]) -> None:
    asks, run_s = [], []
    for at in range(1600):
        # Both ask for all GPUs all the time, one in many short jobs, one in fewer long ones.
        team = "a" if at % 3 else "b"
        lasts_s = 60.0 if team == "a" else 120.0
        asks.append(Ask(job=str(at), submit_s=0.0, gpus=1.0, estimate_s=lasts_s, team=team))
        run_s.append(lasts_s)
    weights = Weights(age=0.0, half_life_s=5_000.0, every_s=30.0)
    ran = simulate(asks, run_s, Counted(16), FairShare(shares, weights))
    until_s = 2000.0  # long before either has nothing left to do
    used = {"a": 0.0, "b": 0.0}
    for ask, first_s, end_s in zip(ran.asks, ran.first_s, ran.end_s, strict=True):
        used[ask.team] += max(0.0, min(end_s, until_s) - min(first_s, until_s))
    assert used["a"] / used["b"] == pytest.approx(shares["a"] / shares["b"], rel=0.1)


def test_waiting_counts_in_the_end() -> None:
    queue = FairShare(weights=Weights(age=1000, fair_share=0, priority=10, oldest_s=100, every_s=1))
    asks = [
        Ask(job="running", submit_s=0, gpus=1, estimate_s=90),
        Ask(job="old", submit_s=1, gpus=1, estimate_s=1),
        Ask(job="important", submit_s=80, gpus=1, estimate_s=1, priority=1),
    ]
    ran = simulate(asks, [90.0, 1.0, 1.0], Counted(1), queue)
    assert ran.first_s.tolist() == [0, 90, 91]
