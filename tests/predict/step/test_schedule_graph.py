"""A plan keeps what the schedule says, and its clock runs many replicas as it runs one."""

from itertools import pairwise

import numpy as np
import pytest

from meshwright.errors import InputError
from meshwright.policy.pipeline import PipelineAction, PipelineSchedule, build_schedule
from meshwright.policy.pipeline.action_times import PipelinePassDurations, compute_action_times
from meshwright.predict.step.schedule_graph import build_schedule_graph, run_schedule
from meshwright.spec.layout import ScheduleKind
from tests.predict.runs import KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_every_change_of_rank_is_one_message(kind: ScheduleKind) -> None:
    schedule = build_schedule(kind, 4, 10)
    routes = schedule.route_by_microbatch()
    moves = sum(sum(a != b for a, b in pairwise(route)) for route in routes)
    messages = build_schedule_graph(schedule).transfers
    assert len(messages) == len(set(messages)) == 2 * moves


@pytest.mark.parametrize("kind", KINDS)
def test_actions_start_where_the_policy_places_them(kind: ScheduleKind) -> None:
    schedule = build_schedule(kind, 4, 10)
    plan, lengths = (
        build_schedule_graph(schedule),
        PipelinePassDurations(forward=3, backward_input=4, backward_weight=2),
    )
    seconds = [0.0] * plan.num_actions
    for _, group, at, *_ in plan.rows:
        actions = tuple(PipelineAction(op, chunk, 0) for op, chunk in plan.groups[group])  # type: ignore[arg-type]
        seconds[at] = lengths.get_duration(actions)
    clocked = run_schedule(
        plan, seconds, 0.0, blocking=False, not_before_s={}, zero=0.0, later=max
    )  # fmt: skip
    assert max(clocked.end_s) == max(one.end for one in compute_action_times(schedule, lengths))


def test_many_replicas_run_as_each_would_alone() -> None:
    plan = build_schedule_graph(build_schedule("zb-v", 4, 8))
    lengths = np.random.default_rng(0).random((plan.num_actions, 3))
    together = run_schedule(
        plan, list(lengths), 0.1, blocking=True, not_before_s={0: 2.0}, zero=np.zeros(3),
        later=np.maximum,
    )  # fmt: skip
    for replica in range(3):
        alone = run_schedule(
            plan, lengths[:, replica].tolist(), 0.1, blocking=True, not_before_s={0: 2.0},
            zero=0.0, later=max,
        )  # fmt: skip
        assert np.array(together.end_s)[:, replica] == pytest.approx(np.array(alone.end_s))


def test_transfers_of_a_rank_leave_one_after_the_other() -> None:
    plan = build_schedule_graph(build_schedule("gpipe", 2, 6))
    clocked = run_schedule(
        plan, [1.0] * plan.num_actions, 5.0, blocking=False, not_before_s={}, zero=0.0, later=max
    )
    forward = [i for i, message in enumerate(plan.transfers) if message.forward]
    leaves = sorted(clocked.departure_s[i] for i in forward)
    assert all(b - a >= 5.0 for a, b in pairwise(leaves))


def test_no_more_than_two_passes_start_together() -> None:
    three = tuple(PipelineAction("F", 0, i, is_concurrent=i > 0) for i in range(3))
    back = tuple(PipelineAction("B", 0, i) for i in range(3))
    schedule = PipelineSchedule(
        kind="own", routes=((0,),), microbatches=3, actions=((*three, *back),)
    )
    with pytest.raises(InputError, match="3 passes start together"):
        build_schedule_graph(schedule)
