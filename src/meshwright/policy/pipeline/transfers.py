"""Writes sends and receives into a schedule so that no pair of ranks can wait for each other.

Every transfer takes one place in a single order of events that all ranks share: a rank's list is
that order with the others' events left out. Whoever runs such lists in order cannot deadlock, even
where a send waits for its receiver, because the earliest unfinished event can always run.
"""

import msgspec

from meshwright.policy.pipeline.earliest import place
from meshwright.policy.pipeline.schedule import TRANSFERS, Action, Schedule


def with_transfers(schedule: Schedule) -> Schedule:
    """Return a sound schedule with a send and a receive wherever a result changes ranks.

    Each result is sent as soon as it exists. The receive stands where the receiver would be at
    that moment if all passes were equally long, which is before its use and often well before:
    an asynchronous receive is started there and waited for at the use.
    """
    routes = schedule.route_by_microbatch()
    events: list[tuple[float, int, int, int]] = []
    placed = place(schedule)
    for number, one in enumerate(placed):
        events.append((one.start, 1, one.rank, number))
        events.append((one.end, 0, one.rank, number))
    events.sort()
    lanes: list[list[Action]] = [[] for _ in schedule.actions]
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


def batch_transfers(schedule: Schedule) -> Schedule:
    """Return the schedule with transfers that follow each other joined into one batch.

    This is how `torch.distributed.batch_isend_irecv` takes them. A batch waits for all of its
    transfers, as the same rank would one by one, and offers all at once, so it blocks less.
    """
    lanes = []
    for lane in schedule.actions:
        batched: list[Action] = []
        for action in lane:
            follows = bool(batched) and batched[-1].op in TRANSFERS and action.op in TRANSFERS
            batched.append(action._replace(joined=True) if follows else action)
        lanes.append(tuple(batched))
    return msgspec.structs.replace(schedule, actions=tuple(lanes))


def _message(action: Action, chunks: int) -> tuple[Action, Action] | None:
    """The send and the receive that hand an action's result to the neighbouring chunk."""
    op, chunk, microbatch, _ = action
    if op == "F" and chunk + 1 < chunks:
        return (
            Action("send_forward", chunk, microbatch),
            Action("recv_forward", chunk + 1, microbatch),
        )
    if op in ("B", "I") and chunk > 0:
        return (
            Action("send_backward", chunk, microbatch),
            Action("recv_backward", chunk - 1, microbatch),
        )
    return None
