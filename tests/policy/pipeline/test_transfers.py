"""Sends and receives are complete, in order, and cannot deadlock even where sends wait."""

from collections import Counter
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.policy.pipeline import (
    PipelineAction,
    PipelineSchedule,
    add_transfers,
    batch_transfers,
    build_schedule,
    verify_schedule,
)
from meshwright.policy.pipeline.action_times import remove_transfers
from meshwright.policy.pipeline.dependency_walk import DependencyRules, walk_schedule
from meshwright.policy.pipeline.schedule import TRANSFER_OPS
from tests.policy.pipeline.reference import schedules


def naive(schedule: PipelineSchedule) -> PipelineSchedule:
    """Receive right before the use, send right after the pass: what one writes first."""
    full = add_transfers(schedule)
    wanted = {tuple(a[:3]) for lane in full.actions for a in lane if a.op in TRANSFER_OPS}
    lanes = []
    for lane in schedule.actions:
        written: list[PipelineAction] = []
        for action in lane:
            way = "forward" if action.op == "F" else "backward"
            for end in ("recv", "send"):
                move = PipelineAction(f"{end}_{way}", *action[1:3])  # type: ignore[arg-type]
                if end == "send":
                    written.append(action)
                if action.op != "W" and tuple(move[:3]) in wanted:
                    written.append(move)
        lanes.append(tuple(written))
    return msgspec.structs.replace(schedule, actions=tuple(lanes))


def meets(schedule: PipelineSchedule) -> bool:
    """Whether all ranks finish if a transfer takes place once both ranks have come to it."""
    todo = [list(lane) for lane in schedule.actions]
    moved = True
    while moved:
        moved = False
        for lane in todo:
            while lane and lane[0].op not in TRANSFER_OPS:
                lane.pop(0)
                moved = True
        for lane in todo:
            if lane and lane[0].op.startswith("send"):
                op, chunk, microbatch, _ = lane[0]
                to = chunk + 1 if op == "send_forward" else chunk - 1
                wanted = (op.replace("send", "recv"), to, microbatch)
                peer = todo[schedule.peer_rank(lane[0])]
                if peer and tuple(peer[0][:3]) == wanted:
                    peer.pop(0)
                    lane.pop(0)
                    moved = True
    return not any(todo)


@given(schedules())
def test_written_transfers_are_sound_however_sends_behave(schedule: PipelineSchedule) -> None:
    full = add_transfers(schedule)
    assert verify_schedule(full, sends="rendezvous") == ()
    assert verify_schedule(full, sends="buffered") == ()


@given(schedules())
def test_batched_transfers_are_sound_however_sends_behave(schedule: PipelineSchedule) -> None:
    full = batch_transfers(add_transfers(schedule))
    assert verify_schedule(full, sends="rendezvous") == ()
    assert verify_schedule(full, sends="buffered") == ()


@given(schedules())
def test_batches_stand_alone_between_passes(schedule: PipelineSchedule) -> None:
    for lane in batch_transfers(add_transfers(schedule)).actions:
        for before, after in pairwise(lane):
            if after.op in TRANSFER_OPS:
                assert after.is_concurrent == (before.op in TRANSFER_OPS)


@given(schedules())
def test_transfers_leave_the_order_of_the_passes_alone(schedule: PipelineSchedule) -> None:
    assert remove_transfers(add_transfers(schedule)) == schedule


@given(schedules())
def test_writing_transfers_twice_changes_nothing(schedule: PipelineSchedule) -> None:
    full = add_transfers(schedule)
    assert add_transfers(full) == full


@given(schedules())
def test_every_hop_between_ranks_is_sent_and_received_each_way(schedule: PipelineSchedule) -> None:
    hops = sum(a != b for route in schedule.route_by_microbatch() for a, b in pairwise(route))
    full = add_transfers(schedule)
    found = Counter(str(action.op) for lane in full.actions for action in lane)
    assert {op: found[op] for op in TRANSFER_OPS} == dict.fromkeys(TRANSFER_OPS, hops)


@given(schedules(most_ranks=4, most_microbatches=6), st.data())
def test_rendezvous_deadlocks_are_found_exactly(
    schedule: PipelineSchedule, data: st.DataObject
) -> None:
    # Moves a few transfers about and compares with ranks that wait to meet.
    lanes = [list(lane) for lane in add_transfers(schedule).actions]
    lanes = [[a._replace(is_concurrent=False) for a in lane] for lane in lanes]
    for _ in range(data.draw(st.integers(0, 3))):
        movable = [
            (rank, index)
            for rank, lane in enumerate(lanes)
            for index, (a, b) in enumerate(pairwise(lane))
            if {a.op, b.op} & TRANSFER_OPS and not _bound(a, b)
        ]
        if movable:
            rank, index = data.draw(st.sampled_from(movable))
            lane = lanes[rank]
            lane[index], lane[index + 1] = lane[index + 1], lane[index]
    moved = msgspec.structs.replace(schedule, actions=tuple(tuple(lane) for lane in lanes))
    assert (not walk_schedule(DependencyRules(moved)).blocked) == meets(moved)


def _bound(a: PipelineAction, b: PipelineAction) -> bool:
    """Whether a pass and its own transfer would change places."""
    return a[1:3] == b[1:3]


@pytest.mark.parametrize("kind", ["1f1b", "interleaved", "zb-h1", "zb-h2"])
def test_the_naive_order_deadlocks_where_sends_wait(kind: str) -> None:
    schedule = naive(build_schedule(kind, 4, 8))  # type: ignore[arg-type]
    assert verify_schedule(schedule, sends="buffered") == ()
    (problem,) = verify_schedule(schedule, sends="rendezvous")
    assert problem.what.startswith("deadlock with rendezvous sends: rank ")
    assert "with_transfers" in problem.fix


def test_the_naive_order_confuses_messages_where_the_model_is_folded() -> None:
    # Between two ranks of a V, forwards and gradients of both arms go the same way.
    problem, *_ = verify_schedule(naive(build_schedule("zb-v", 4, 8)), sends="buffered")
    assert problem.fix == "list both sides in the same order"


def test_the_fold_of_a_v_needs_no_transfer() -> None:
    full = add_transfers(build_schedule("zb-v", 3, 4))
    ends = {action.chunk for action in full.actions[2] if action.op == "send_forward"}
    assert ends == {3}  # chunk 2 hands over to chunk 3 on the same rank


def test_one_rank_needs_no_transfers() -> None:
    assert not add_transfers(build_schedule("1f1b", 1, 4)).has_transfers


@given(schedules(most_ranks=4, most_microbatches=6), st.data())
def test_a_lost_transfer_is_named(schedule: PipelineSchedule, data: st.DataObject) -> None:
    full = add_transfers(schedule)
    moves = [(r, i) for r, lane in enumerate(full.actions) for i, a in enumerate(lane)
             if a.op in TRANSFER_OPS]  # fmt: skip
    if len(moves) < 2:
        return
    rank, index = data.draw(st.sampled_from(moves))
    lane = full.actions[rank]
    lanes = list(full.actions)
    lanes[rank] = lane[:index] + lane[index + 1 :]
    (problem,) = verify_schedule(msgspec.structs.replace(full, actions=tuple(lanes)))
    assert (problem.where, problem.what) == (f"rank {rank}", f"{lane[index]} is missing")


def two_ranks(first: list[PipelineAction], second: list[PipelineAction]) -> PipelineSchedule:
    return PipelineSchedule(
        kind="x", routes=((0, 1),), microbatches=2, actions=(tuple(first), tuple(second))
    )


def test_a_send_before_its_pass_is_named() -> None:
    full = add_transfers(build_schedule("gpipe", 2, 2))
    lane = list(full.actions[0])
    lane[0], lane[1] = lane[1], lane[0]
    (problem, *_) = verify_schedule(two_ranks(lane, list(full.actions[1])))
    assert problem.where == "rank 0, action 0"
    assert problem.what == "send_forward of chunk 0, microbatch 0 before it exists"


def test_a_deadlock_that_buffers_cannot_mend_is_told_without_that_advice() -> None:
    # Rank 0 wants its gradient before it hands over what the gradient is made from.
    full = add_transfers(build_schedule("1f1b", 2, 1))
    lane = [full.actions[0][i] for i in (0, 2, 1, 3)]
    broken = msgspec.structs.replace(full, actions=(tuple(lane), full.actions[1]))
    for sends in ("buffered", "rendezvous"):
        (problem,) = verify_schedule(broken, sends=sends)
        assert problem.where == "rank 0, action 1"
        assert problem.what.startswith(f"deadlock with {sends} sends")
        assert problem.fix == ""


def test_a_receive_after_its_use_is_named() -> None:
    full = add_transfers(build_schedule("gpipe", 2, 2))
    lane = list(full.actions[1])
    lane[0], lane[1] = lane[1], lane[0]
    (problem, *_) = verify_schedule(two_ranks(list(full.actions[0]), lane))
    assert problem.where == "rank 1, action 1"
    assert problem.what == "recv_forward of chunk 1, microbatch 0 after its use"


def test_messages_that_would_be_mistaken_for_each_other_are_named() -> None:
    passes = [
        PipelineAction("F", 1, 0),
        PipelineAction("F", 1, 1),
        PipelineAction("B", 1, 0),
        PipelineAction("B", 1, 1),
    ]
    takes = [
        PipelineAction("recv_forward", 1, 1),
        PipelineAction("recv_forward", 1, 0, is_concurrent=True),
    ]
    gives = [PipelineAction("send_backward", 1, 0), PipelineAction("send_backward", 1, 1)]
    full = add_transfers(build_schedule("gpipe", 2, 2))
    (problem,) = verify_schedule(two_ranks(list(full.actions[0]), takes + passes + gives))
    assert problem.where == "rank 1, action 0"
    assert "takes forward for chunk 1, microbatch 1 from rank 0, which next sends" in problem.what


def test_a_needless_or_doubled_transfer_is_named() -> None:
    full = add_transfers(build_schedule("gpipe", 2, 2))
    first = [*full.actions[0], PipelineAction("send_backward", 0, 0), full.actions[0][1]]
    whats = [p.what for p in verify_schedule(two_ranks(first, list(full.actions[1])))]
    assert whats == [
        "send_forward of chunk 0, microbatch 0 stands here and again further on",
        "send_backward of chunk 0, microbatch 0 moves nothing that another rank needs",
    ]


def test_a_pass_has_no_peer() -> None:
    with pytest.raises(ValueError, match="F of chunk 0, microbatch 0 is not a transfer"):
        build_schedule("1f1b", 2, 2).peer_rank(PipelineAction("F", 0, 0))
