"""Signs in sends and receives: a message to the wrong rank, and ranks that wait in a circle."""

from collections import defaultdict
from collections.abc import Collection, Iterable

from meshwright.observe.analyze.hang.dump_index import DumpIndex, RankWait, get_peer_rank
from meshwright.observe.analyze.hang.evidence import FaultEvidence, format_operation
from meshwright.observe.analyze.hang.graph_components import find_sink_components
from meshwright.spec.units import format_ranks
from meshwright.timeline.readers.flight_recorder.flight_recorder_reader import (
    RecordedGroup,
    RecordedOperation,
)


def find_wrong_peers(board: DumpIndex, waits: Iterable[RankWait]) -> list[FaultEvidence]:
    """Find ranks that send to one that receives nothing, while another waits for that very message.

    The message is told by its group and sizes. The sender must be in nothing else, and the one it
    sends to in nothing at all: in the middle of a pipeline both ends of a rank wait for it.
    """
    waiters: dict[int, set[int]] = defaultdict(set)
    wanted: dict[tuple[int, RecordedGroup, object], RankWait] = {}
    sent: list[RankWait] = []
    for wait in waits:
        waiters[wait.blocking_rank].add(wait.waiting_rank)
        each = wait.operation
        if wait.reason == "missing" and each.name == "recv":
            wanted.setdefault((each.source, each.group, each.output_sizes), wait)
        elif wait.reason == "missing" and each.name == "send":
            sent.append(wait)
    found = []
    for wait in sent:
        each = wait.operation
        other = wanted.get((wait.waiting_rank, each.group, each.input_sizes))
        is_all = board.pending[wait.waiting_rank] == [each] and not board.pending.get(
            wait.blocking_rank
        )
        if other is not None and is_all and waiters[wait.blocking_rank] == {wait.waiting_rank}:
            reason = (
                f"its {format_operation(each)} is received by nobody, while rank "
                f"{other.waiting_rank} waits in "
                f"{format_operation(other.operation)}"
            )
            found.append(FaultEvidence(wait.waiting_rank, "peer", reason, each, 1))
    return found


def find_p2p_deadlocks(board: DumpIndex, ranks: Collection[int]) -> list[FaultEvidence]:
    """Find ranks whose sends and receives wait for each other in a circle.

    Each is in a send or receive whose other end the peer has not enqueued, or has behind the one it
    is in itself: the order of the program is at fault. Only the first messages of a group count:
    an order that worked before is held up by something else.
    """
    edges: dict[int, set[int]] = {}
    inside: dict[int, RecordedOperation] = {}
    for rank in ranks:
        heads = board.find_first_pending(rank)
        if heads and all(head.is_p2p and head.sequence_id == 1 for head in heads):
            edges[rank] = {peer for head in heads if (peer := _blocked_by(board, head)) is not None}
            inside[rank] = heads[0]
    edges = {rank: ahead & edges.keys() for rank, ahead in edges.items()}
    found = []
    for circle in find_sink_components(edges):
        if len(circle) > 1:
            for rank in circle:
                others = format_ranks(other for other in circle if other != rank)
                reason = (
                    f"is in {format_operation(inside[rank])}, and its peer is in another operation "
                    f"before the "
                    f"other end of it: it waits in a circle with {others}"
                )
                found.append(FaultEvidence(rank, "crossed", reason, inside[rank], len(circle)))
    return found


def _blocked_by(board: DumpIndex, head: RecordedOperation) -> int | None:
    """Return the peer that is in something else than the other end of an operation."""
    peer = get_peer_rank(head)
    first = board.find_first_pending(peer)
    if not first or first[0].record_id < 0:
        return None
    theirs = board.match_p2p(head, peer)
    return peer if theirs is None or first[0].record_id < theirs.record_id else None
