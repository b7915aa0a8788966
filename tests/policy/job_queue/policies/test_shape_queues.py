"""Lanes keep a queue in order by shape, and find the next short job without looking at all."""

import random

from meshwright.policy.job_queue import JobRequest, QueuedJob
from meshwright.policy.job_queue.policies.shape_queues import ShapeQueues


def waiting(count: int, seed: int = 0) -> tuple[ShapeQueues, list[QueuedJob]]:
    draw, lanes, jobs = random.Random(seed), ShapeQueues(), []
    for index in range(count):
        ask = JobRequest(
            job_id=str(index), submit_s=draw.random(), gpus=float(draw.choice((1, 2, 8))),
            estimate_s=float(draw.randrange(1, 10_000)),
        )  # fmt: skip
        jobs.append(QueuedJob(index, ask))
        lanes.add(ask.submit_s, jobs[-1])
    return lanes, jobs


def test_all_who_wait_are_told_in_order() -> None:
    lanes, jobs = waiting(2000)
    told = list(lanes.iter_ordered())
    for at in (0, 1, 255, 256, len(told) - 1):
        key = told[at].request.submit_s
        assert list(lanes.iter_ordered((key, told[at].index + 1))) == told[at + 1 :]
    assert told == sorted(jobs, key=lambda one: (one.request.submit_s, one.index))
    assert len(lanes) == 2000


def test_the_first_of_those_that_fit_is_found() -> None:
    lanes, jobs = waiting(500)
    for free in (1, 2, 8):
        lane = lanes.find_first_fitting(free)
        assert lane is not None
        first = min((one for one in jobs if one.gpus <= free), key=lambda one: one.request.submit_s)
        assert lane.get((0, 0))[2] is first
    assert lanes.find_first_fitting(0) is None


def test_short_jobs_are_found_in_turn_while_others_are_taken() -> None:
    lanes, jobs = waiting(3000, seed=2)
    lane = lanes.queues[jobs[0].shape]
    short = sorted(
        (one for one in jobs if one.shape == jobs[0].shape and one.estimate_s <= 500),
        key=lambda one: one.request.submit_s,
    )
    found, spot = [], lane.find_shorter((0, 0), 500)
    while spot is not None:
        found.append(lanes.pop(lane, spot))
        spot = lane.find_shorter(spot, 500)
    assert found == short
    assert len(lanes) == 3000 - len(short)


def test_anybody_can_be_taken_out() -> None:
    lanes, jobs = waiting(1000, seed=3)
    random.Random(1).shuffle(jobs)
    for one in jobs[:900]:
        lanes.remove(one.request.submit_s, one)
    left = sorted(jobs[900:], key=lambda one: (one.request.submit_s, one.index))
    assert list(lanes.iter_ordered()) == left
