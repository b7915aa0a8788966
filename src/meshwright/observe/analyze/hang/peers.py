"""Signs in sends and receives: a message to the wrong rank, and ranks that wait in a circle."""

from collections import defaultdict
from collections.abc import Collection, Iterable

from meshwright.observe.analyze.hang.board import Board, Wait, peer_of
from meshwright.observe.analyze.hang.clues import Clue, ranks_text, title
from meshwright.observe.analyze.hang.components import last_components
from meshwright.timeline.readers.flight_recorder import Group, Operation


def wrong_peers(board: Board, waits: Iterable[Wait]) -> list[Clue]:
    """Find ranks that send to one that receives nothing, while another waits for that very message.

    The message is told by its group and sizes. The sender must be in nothing else, and the one it
    sends to in nothing at all: in the middle of a pipeline both ends of a rank wait for it.
    """
    waiters: dict[int, set[int]] = defaultdict(set)
    wanted: dict[tuple[int, Group, object], Wait] = {}
    sent: list[Wait] = []
    for wait in waits:
        waiters[wait.on].add(wait.waiter)
        each = wait.operation
        if wait.why == "missing" and each.name == "recv":
            wanted.setdefault((each.source, each.group, each.output_sizes), wait)
        elif wait.why == "missing" and each.name == "send":
            sent.append(wait)
    found = []
    for wait in sent:
        each = wait.operation
        other = wanted.get((wait.waiter, each.group, each.input_sizes))
        is_all = board.pending[wait.waiter] == [each] and not board.pending.get(wait.on)
        if other is not None and is_all and waiters[wait.on] == {wait.waiter}:
            reason = (
                f"its {title(each)} is received by nobody, while rank {other.waiter} waits in "
                f"{title(other.operation)}"
            )
            found.append(Clue(wait.waiter, "peer", reason, each, 1))
    return found


def crossed(board: Board, ranks: Collection[int]) -> list[Clue]:
    """Find ranks whose sends and receives wait for each other in a circle.

    Each is in a send or receive whose other end the peer has not enqueued, or has behind the one it
    is in itself: the order of the program is at fault. Only the first messages of a group count:
    an order that worked before is held up by something else.
    """
    edges: dict[int, set[int]] = {}
    inside: dict[int, Operation] = {}
    for rank in ranks:
        heads = board.heads(rank)
        if heads and all(head.is_p2p and head.sequence == 1 for head in heads):
            edges[rank] = {peer for head in heads if (peer := _blocked_by(board, head)) is not None}
            inside[rank] = heads[0]
    edges = {rank: ahead & edges.keys() for rank, ahead in edges.items()}
    found = []
    for circle in last_components(edges):
        if len(circle) > 1:
            for rank in circle:
                others = ranks_text(other for other in circle if other != rank)
                reason = (
                    f"is in {title(inside[rank])}, and its peer is in another operation before the "
                    f"other end of it: it waits in a circle with {others}"
                )
                found.append(Clue(rank, "crossed", reason, inside[rank], len(circle)))
    return found


def _blocked_by(board: Board, head: Operation) -> int | None:
    """Return the peer that is in something else than the other end of an operation."""
    peer = peer_of(head)
    first = board.heads(peer)
    if not first or first[0].record < 0:
        return None
    theirs = board.match(head, peer)
    return peer if theirs is None or first[0].record < theirs.record else None
