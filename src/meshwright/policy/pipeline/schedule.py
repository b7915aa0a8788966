"""`PipelineSchedule`: the ordered actions of every pipeline rank, without durations or devices.

A model is cut into chunks, numbered in the order a token meets them. A route says which rank runs
each chunk; DualPipe has two routes, one from either end, every other schedule has one.
"""

from typing import Literal, NamedTuple, get_args

import msgspec

PipelineOp = Literal[
    "F",
    "B",
    "I",
    "W",
    "send_forward",
    "recv_forward",
    "send_backward",
    "recv_backward",
]
"""F forward; B full backward; I backward of the inputs, which the chunk before waits for;
W backward of the weights, which nobody waits for; and the transfers between ranks."""

PIPELINE_OPS: frozenset[str] = frozenset(get_args(PipelineOp))
TRANSFER_OPS: frozenset[str] = frozenset(
    {"send_forward", "recv_forward", "send_backward", "recv_backward"}
)

_TOWARDS_THE_HEAD = frozenset({"send_forward", "recv_backward"})


class PipelineAction(NamedTuple):
    """One thing a rank does."""

    op: PipelineOp
    """What is done."""
    chunk: int
    """The chunk it is done with; a transfer names the chunk of the rank that acts."""
    microbatch: int
    """Which microbatch, the first is 0."""
    is_concurrent: bool = False
    """Starts together with the action before it: a forward and a backward that overlap
    (DualPipe), or the transfers of one batch."""

    def __str__(self) -> str:
        return f"{self.op} of chunk {self.chunk}, microbatch {self.microbatch}"


class PipelineSchedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The actions of every pipeline rank in one training step."""

    kind: str
    """Its name; a layout's `schedule` where a layout can ask for it."""
    routes: tuple[tuple[int, ...], ...]
    """For each route, the rank of every chunk. Microbatches are dealt to the routes in equal
    runs, the first run to the first route."""
    microbatches: int
    """Microbatches in the step, over all routes."""
    actions: tuple[tuple[PipelineAction, ...], ...]
    """What each rank does, rank 0 first."""

    @property
    def ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.actions)

    @property
    def chunks(self) -> int:
        """Chunks a token passes from embedding to head."""
        return len(self.routes[0])

    @property
    def has_transfers(self) -> bool:
        """Whether sends and receives are written out."""
        return any(action.op in TRANSFER_OPS for lane in self.actions for action in lane)

    def route_of(self, microbatch: int) -> tuple[int, ...]:
        """Return the ranks a microbatch passes, in chunk order."""
        return self.routes[microbatch * len(self.routes) // self.microbatches]

    def route_by_microbatch(self) -> list[tuple[int, ...]]:
        """Return the route of every microbatch, for loops that ask often."""
        return [self.route_of(microbatch) for microbatch in range(self.microbatches)]

    def rank_of(self, chunk: int, microbatch: int) -> int:
        """Return the rank on which a microbatch meets a chunk."""
        return self.route_of(microbatch)[chunk]

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Return the chunks whose weights a rank holds, in model order."""
        held = {c for route in self.routes for c, holder in enumerate(route) if holder == rank}
        return tuple(sorted(held))

    def peer_rank(self, action: PipelineAction) -> int:
        """Return the rank at the other end of a transfer."""
        if action.op not in TRANSFER_OPS:
            raise ValueError(f"{action} is not a transfer")
        step = 1 if action.op in _TOWARDS_THE_HEAD else -1
        return self.rank_of(action.chunk + step, action.microbatch)


def split_concurrent_groups(lane: tuple[PipelineAction, ...]) -> list[tuple[PipelineAction, ...]]:
    """Cut a rank's actions into what starts together; most groups hold one action."""
    if not any(action.is_concurrent for action in lane):
        return [(action,) for action in lane]
    found: list[tuple[PipelineAction, ...]] = []
    for action in lane:
        if action.is_concurrent and found:
            found[-1] = (*found[-1], action)
        else:
            found.append((action,))
    return found
