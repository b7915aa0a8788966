"""Writes sends and receives into a schedule so that no pair of ranks can wait for each other.

Every transfer takes one place in a single order of events that all ranks share: a rank's list is
that order with the others' events left out. Whoever runs such lists in order cannot deadlock, even
where a send waits for its receiver, because the earliest unfinished event can always run.
"""

import msgspec

from meshwright.policy.pipeline.action_times import compute_action_times
from meshwright.policy.pipeline.schedule import TRANSFER_OPS, PipelineAction, PipelineSchedule


def add_transfers(schedule: PipelineSchedule) -> PipelineSchedule:
    """Return a sound schedule with a send and a receive wherever a result changes ranks.

    Each result is sent as soon as it exists. The receive stands where the receiver would be at
    that moment if all passes were equally long, which is before its use and often well before:
    an asynchronous receive is started there and waited for at the use.
    """
    routes = schedule.route_by_microbatch()
    events: list[tuple[float, int, int, int]] = []
    placed = compute_action_times(schedule)
    for number, one in enumerate(placed):
        events.append((one.start, 1, one.rank, number))
        events.append((one.end, 0, one.rank, number))
    events.sort()
    lanes: list[list[PipelineAction]] = [[] for _ in schedule.actions]
    for _, is_start, rank, number in events:
        group = placed[number].group
        if is_start:
            lanes[rank] += group
            continue
        for action in group:
            message = _message(action, schedule.chunks)
            if message is None:
                continue
            send, receive = message
            receiver = routes[action.microbatch][receive.chunk]
            if receiver != rank:
                lanes[rank].append(send)
                lanes[receiver].append(receive)
    return msgspec.structs.replace(schedule, actions=tuple(tuple(lane) for lane in lanes))


def batch_transfers(schedule: PipelineSchedule) -> PipelineSchedule:
    """Return the schedule with transfers that follow each other joined into one batch.

    This is how `torch.distributed.batch_isend_irecv` takes them. A batch waits for all of its
    transfers, as the same rank would one by one, and offers all at once, so it blocks less.
    """
    lanes = []
    for lane in schedule.actions:
        batched: list[PipelineAction] = []
        for action in lane:
            follows = bool(batched) and batched[-1].op in TRANSFER_OPS and action.op in TRANSFER_OPS
            batched.append(action._replace(is_concurrent=True) if follows else action)
        lanes.append(tuple(batched))
    return msgspec.structs.replace(schedule, actions=tuple(lanes))


def _message(action: PipelineAction, chunks: int) -> tuple[PipelineAction, PipelineAction] | None:
    """The send and the receive that hand an action's result to the neighbouring chunk."""
    op, chunk, microbatch, _ = action
    if op == "F" and chunk + 1 < chunks:
        return (
            PipelineAction("send_forward", chunk, microbatch),
            PipelineAction("recv_forward", chunk + 1, microbatch),
        )
    if op in ("B", "I") and chunk > 0:
        return (
            PipelineAction("send_backward", chunk, microbatch),
            PipelineAction("recv_backward", chunk - 1, microbatch),
        )
    return None
