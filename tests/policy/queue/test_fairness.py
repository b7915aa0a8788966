"""Who is worst off goes first; unlike GPUs go to those who gain most by them."""

import pytest

from meshwright.policy.queue import Ask, Counted, Node, Nodes
from meshwright.policy.queue.fairness import FinishTime, Shares
from meshwright.policy.queue.ordered import Skipping
from meshwright.predict.queue import outcome_of, simulate
from tests.policy.queue.drawn import drawn


def test_the_worst_ratio_is_better_than_that_of_a_queue_by_arrival() -> None:
    for seed in range(3):
        asks, run_s = drawn(seed, 150)
        fair = outcome_of(simulate(asks, run_s, Counted(20), FinishTime(round_s=60)))
        fifo = outcome_of(simulate(asks, run_s, Counted(20), Skipping()))
        assert fair.fairness.finish_time.p99 < fifo.fairness.finish_time.p99


def test_a_small_job_on_its_share_has_a_ratio_of_one() -> None:
    queue = FinishTime()
    ran = simulate([Ask(job="a", submit_s=0, gpus=2, estimate_s=10)], [10.0], Counted(4), queue)
    assert outcome_of(ran).fairness.finish_time.most == pytest.approx(1.0)


def test_kinds_go_to_those_who_gain_most_and_progress_stays_even() -> None:
    nodes = [Node(gpus=4, kind="old"), Node(gpus=4, kind="new")]
    asks = [
        Ask(job="gains", submit_s=0, gpus=4, speeds={"old": 1.0, "new": 4.0}),
        Ask(job="same", submit_s=0, gpus=4, speeds={"old": 1.0, "new": 1.0}),
    ]
    ran = simulate(asks, [4000.0, 1000.0], Nodes(nodes), Shares(round_s=100))
    # Each is alone on the kind that suits it best: 4000 s of work at four times the speed.
    assert ran.end_s.tolist() == pytest.approx([1000, 1000])


@pytest.mark.parametrize("count", [3, 5])
def test_equal_jobs_take_turns(count: int) -> None:
    asks = [Ask(job=str(at), submit_s=0, gpus=1) for at in range(count)]
    ran = simulate(asks, [1000.0] * count, Counted(1), Shares(round_s=10))
    assert ran.end_s.min() > 1000 * (count - 1)
