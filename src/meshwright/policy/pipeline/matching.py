"""Do the sends and receives of a schedule match? It knows nothing of waiting.

Each result that changes ranks is sent once, after it exists, and received once, before its use.
Between two ranks messages arrive in the order they were sent (NCCL knows no tags), so both sides
must list them in the same order.
"""

from collections.abc import Iterator
from itertools import pairwise

from meshwright.errors import Problem
from meshwright.policy.pipeline.schedule import TRANSFERS, Action, Op, Schedule

_Key = tuple[Op, int, int]

_PASSES: dict[str, tuple[Op, ...]] = {
    "send_forward": ("F",),
    "recv_forward": ("F",),
    "send_backward": ("B", "I"),
    "recv_backward": ("B", "I"),
}
"""The pass whose result a send takes, or that a receive feeds."""


def mismatches(schedule: Schedule) -> Iterator[Problem]:
    """Yield every transfer that is missing, needless, doubled, out of place or out of order."""
    wanted = dict(_wanted(schedule))
    sound = True
    for rank, lane in enumerate(schedule.actions):
        seen = {(action.op, action.chunk, action.microbatch): i for i, action in enumerate(lane)}
        for index, action in enumerate(lane):
            if action.op in TRANSFERS:
                for problem in _faults(rank, index, action, seen, wanted):
                    sound = False
                    yield problem
        for key in seen.keys() & wanted.keys():
            del wanted[key]
    for (op, chunk, microbatch), rank in wanted.items():
        sound = False
        what = f"{op} of chunk {chunk}, microbatch {microbatch} is missing"
        yield Problem(f"rank {rank}", what)
    if sound:
        yield from _out_of_order(schedule)


def _wanted(schedule: Schedule) -> Iterator[tuple[_Key, int]]:
    """Every transfer there must be, with the rank that does it."""
    for microbatch, route in enumerate(schedule.route_by_microbatch()):
        for chunk, (rank, following) in enumerate(pairwise(route)):
            if rank != following:
                yield ("send_forward", chunk, microbatch), rank
                yield ("recv_forward", chunk + 1, microbatch), following
                yield ("send_backward", chunk + 1, microbatch), following
                yield ("recv_backward", chunk, microbatch), rank


def _faults(
    rank: int, index: int, action: Action, seen: dict[_Key, int], wanted: dict[_Key, int]
) -> Iterator[Problem]:
    where = f"rank {rank}, action {index}"
    op, chunk, microbatch, _ = action
    if (op, chunk, microbatch) not in wanted:
        yield Problem(where, f"{action} moves nothing that another rank needs", "drop it")
        return
    if seen[op, chunk, microbatch] != index:
        yield Problem(where, f"{action} stands here and again further on", "drop one")
        return
    for own in _PASSES[op]:
        use = seen.get((own, chunk, microbatch))
        if use is None:
            continue  # the other form of the backward; a missing pass is reported elsewhere
        if op.startswith("send") and index < use:
            yield Problem(where, f"{action} before it exists", f"move it behind action {use}")
        if op.startswith("recv") and index > use:
            yield Problem(where, f"{action} after its use", f"move it before action {use}")


def _out_of_order(schedule: Schedule) -> Iterator[Problem]:
    """The first message between every two ranks that the receiver takes for another."""
    sent: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    received: dict[tuple[int, int], list[tuple[str, int, int, int]]] = {}
    for rank, lane in enumerate(schedule.actions):
        for index, action in enumerate(lane):
            if action.op not in TRANSFERS:
                continue
            op, chunk, microbatch, _ = action
            end, way = op.split("_")
            peer = schedule.peer(action)
            if end == "send":
                to = chunk + 1 if way == "forward" else chunk - 1
                sent.setdefault((rank, peer), []).append((way, to, microbatch))
            else:
                received.setdefault((peer, rank), []).append((way, chunk, microbatch, index))
    for (sender, receiver), messages in sent.items():
        for sends, takes in zip(messages, received[sender, receiver], strict=True):
            if sends != takes[:3]:
                what = (
                    f"takes {takes[0]} for chunk {takes[1]}, microbatch {takes[2]} from rank "
                    f"{sender}, which next sends {sends[0]} for chunk {sends[1]}, microbatch "
                    f"{sends[2]}"
                )
                fix = "list both sides in the same order"
                yield Problem(f"rank {receiver}, action {takes[3]}", what, fix)
                break
