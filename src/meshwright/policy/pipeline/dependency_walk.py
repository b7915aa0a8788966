"""Lets the ranks of a schedule run in order, each waiting for what it needs, until all are done.

This is where dependencies live. There is no time here: only what comes before what, and who waits
for whom when nobody can go on. Sends either leave at once into a buffer, or wait until the
receiver is there (rendezvous, as NCCL may behave).
"""

from typing import Literal, NamedTuple

from meshwright.policy.pipeline.schedule import (
    PipelineAction,
    PipelineSchedule,
    split_concurrent_groups,
)

SendMode = Literal["buffered", "rendezvous"]

Keys = tuple[int, ...]
StepKeys = tuple[Keys, Keys, Keys]
"""What a rank does at once: it shows some keys, waits for others, and then gives yet others."""

_FORWARD, _BACKWARD, _SENT, _POSTED, _HERE = 0, 1, 2, 4, 6
_NONE: Keys = ()


class DependencyRules:
    """What every action of one schedule shows, needs and gives, as numbered keys.

    The schedule must name existing chunks and microbatches only.
    """

    def __init__(self, schedule: PipelineSchedule, sends: SendMode = "rendezvous") -> None:
        self.groups_by_rank = [split_concurrent_groups(lane) for lane in schedule.actions]
        self.rendezvous = sends == "rendezvous"
        self.transfers = schedule.has_transfers
        self.routes = schedule.route_by_microbatch()
        self.width = schedule.microbatches
        self.block = self.width * schedule.chunks
        self.last = schedule.chunks - 1
        self.keys = 8 * self.block

    def get_step_keys(self, group: tuple[PipelineAction, ...]) -> StepKeys:
        """Return what a group of actions shows, needs and gives."""
        if len(group) == 1:
            return self._single(group[0])
        shows, needs, gives = zip(*(self._single(action) for action in group), strict=True)
        return sum(shows, ()), sum(needs, ()), sum(gives, ())

    def _single(self, action: PipelineAction) -> StepKeys:
        op, chunk, microbatch, _ = action
        here = chunk * self.width + microbatch
        if op == "F":
            if chunk == 0:
                return _NONE, _NONE, (here,)
            return _NONE, (self._arrives(_FORWARD, chunk, chunk - 1, microbatch),), (here,)
        if op in ("B", "I"):
            done = self.block + here
            if chunk == self.last:
                return _NONE, (here,), (done,)
            arrives = self._arrives(_BACKWARD, chunk, chunk + 1, microbatch)
            return _NONE, (here, arrives), (done,)
        if op == "W":
            return _NONE, (self.block + here,), _NONE
        return self._transfer(op, here)

    def _arrives(self, way: int, chunk: int, source: int, microbatch: int) -> int:
        """The key of what `chunk` takes over from its neighbour `source`."""
        if self.transfers:
            route = self.routes[microbatch]
            if route[chunk] != route[source]:
                return (_HERE + way) * self.block + chunk * self.width + microbatch
        return way * self.block + source * self.width + microbatch

    def _transfer(self, op: str, here: int) -> StepKeys:
        # A message carries the number of the chunk that receives it.
        way = _FORWARD if op.endswith("forward") else _BACKWARD
        sent, posted = (_SENT + way) * self.block, (_POSTED + way) * self.block
        if op.startswith("recv"):
            return (posted + here,), (sent + here,), ((_HERE + way) * self.block + here,)
        message = here - self.width if way else here + self.width
        done = way * self.block + here
        return (sent + message,), (done, posted + message) if self.rendezvous else (done,), _NONE


class DependencyWalk(NamedTuple):
    """How far the ranks came."""

    order: list[tuple[int, int]]
    """Rank and group of everything that ran, in an order that respects every dependency."""
    blocked: dict[int, int]
    """The group at which each rank that could not finish waits."""
    missing_keys: dict[int, Keys]
    """What such a rank waits for."""


def walk_schedule(rules: DependencyRules) -> DependencyWalk:
    """Run every rank as far as it gets."""
    have = bytearray(rules.keys)
    at = [0] * len(rules.groups_by_rank)
    shown = [-1] * len(rules.groups_by_rank)
    asleep: dict[int, list[int]] = {}
    order: list[tuple[int, int]] = []
    ready = list(range(len(rules.groups_by_rank)))[::-1]
    step = rules.get_step_keys
    while ready:
        rank = ready.pop()
        lane, index = rules.groups_by_rank[rank], at[rank]
        while index < len(lane):
            shows, needs, gives = step(lane[index])
            if shows and shown[rank] < index:
                shown[rank] = index
                _tell(shows, have, asleep, ready)
            for key in needs:
                if not have[key]:
                    asleep.setdefault(key, []).append(rank)
                    break
            else:
                order.append((rank, index))
                index += 1
                at[rank] = index
                _tell(gives, have, asleep, ready)
                continue
            break
    stuck = {
        rank: index for rank, index in enumerate(at) if index < len(rules.groups_by_rank[rank])
    }
    missing = {
        rank: tuple(key for key in step(rules.groups_by_rank[rank][index])[1] if not have[key])
        for rank, index in stuck.items()
    }
    return DependencyWalk(order, stuck, missing)


def _tell(keys: Keys, have: bytearray, asleep: dict[int, list[int]], ready: list[int]) -> None:
    for key in keys:
        have[key] = 1
        if key in asleep:
            ready += asleep.pop(key)


def find_producers(rules: DependencyRules) -> dict[int, tuple[int, int]]:
    """Return the rank and group that shows or gives each key."""
    found = {}
    for rank, lane in enumerate(rules.groups_by_rank):
        for index, group in enumerate(lane):
            shows, _, gives = rules.get_step_keys(group)
            found.update(dict.fromkeys((*shows, *gives), (rank, index)))
    return found
