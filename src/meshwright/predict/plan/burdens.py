"""What ways to share cost a rank in bytes and seconds, each worked out once.

They depend on the degrees, on how states are shared and on what a rank holds, and many pipelines
have ranks that hold the same.
"""

from typing import NamedTuple

from msgspec.structs import replace

from meshwright.predict.block_comm import place
from meshwright.predict.buckets import Exchange, exchange_of
from meshwright.predict.memory import Rank, Resident, resident
from meshwright.predict.plan.question import Question
from meshwright.predict.run import Run
from meshwright.predict.step import layer_exchange, optimizer_update
from meshwright.spec.layout import Layout, Offload, RankParameters
from meshwright.spec.layout.kinds import ScheduleKind

Key = tuple[object, ...]


class Way:
    """One way to share states with some degrees, and what it costs ranks that hold so much."""

    def __init__(self, question: Question, layout: Layout) -> None:
        self.question, self.run = question, question.run(layout)
        self._residents: dict[Key, Resident] = {}
        self._exchanges: dict[RankParameters, Exchange] = {}
        self._carried: dict[RankParameters, tuple[float, float]] = {}
        self._updates: dict[RankParameters, float] = {}

    def resident(self, rank: Rank, microbatch: int) -> Resident:
        """Return the bytes that such a rank holds."""
        key = (rank.parameters, rank.layers, rank.has_head, microbatch)
        known = self._residents.get(key)
        if known is None:
            run = self.run
            if run.layout.microbatch != microbatch:
                run = self.question.run(replace(run.layout, microbatch=microbatch))
            known = self._residents[key] = resident(run, rank)
        return known

    def exchange(self, trained: RankParameters) -> Exchange:
        """Return the seconds that gradients and updated parameters travel once a step."""
        known = self._exchanges.get(trained)
        if known is None:
            known = self._exchanges[trained] = exchange_of(self.run, trained)
        return known

    def carried(self, held: RankParameters, trained: RankParameters) -> tuple[float, float]:
        """Return the seconds one layer's states travel with every pass."""
        if self.run.layout.zero < 2:
            return 0.0, 0.0
        known = self._carried.get(held)
        if known is None:
            layers = max(1, self.run.model.layers // self.run.layout.pp)
            known = self._carried[held] = layer_exchange(self.run, held, layers, trained)
        return known

    def update_s(self, trained: RankParameters) -> float:
        """Return the seconds of an update."""
        known = self._updates.get(trained)
        if known is None:
            known = self._updates[trained] = optimizer_update(self.run, trained)
        return known


class Tail(NamedTuple):
    """What sharing adds to the passes of a rank at the least."""

    before_s: float
    """Waiting for parameters before the first pass."""
    after_s: float
    """Waiting for gradients after the last."""
    update_s: float
    carried_s: float
    """What travels with the two passes of each layer, hidden or not."""


class Ways:
    """The ways to share of one question."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._known: dict[Key, Way] = {}
        self._every: dict[Key, tuple[tuple[Way, str], ...]] = {}
        self._tails: dict[Key, tuple[Tail, ...]] = {}

    def of(
        self, layout: Layout, zero: int, shard: int | None, offload: tuple[Offload, ...], order: str
    ) -> Way:
        """Return one way to share; orders that put its groups in the same places are one."""
        shared = replace(
            layout, zero=zero, shard=shard, offload=offload, order=order, recompute="none",
            recompute_ops=(), recompute_layers=None, schedule="1f1b", virtual_stages=1,
            stage_layers=None,
        )  # fmt: skip
        axes: tuple[str, ...] = ("dp-cp",) if shard is None else ("shard", "replicate")
        if self.question.model.experts is not None:
            axes += ("expert_dp",)
        places = tuple([place(self.question.limited, shared, axis) for axis in axes])
        key = (*degrees(layout), zero, shard, offload, places)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = Way(self.question, shared)
        return known

    def every(
        self,
        layout: Layout,
        sharings: tuple[tuple[int, int | None], ...],
        offload: tuple[Offload, ...],
        orders: tuple[str, ...],
    ) -> tuple[tuple[Way, str], ...]:
        """Return the different ways to share of some kinds, each with an order that makes it."""
        key = (*degrees(layout), sharings, offload, orders)
        known = self._every.get(key)
        if known is None:
            found: dict[Way, str] = {}
            for zero, shard in sharings:
                for order in orders:
                    found.setdefault(self.of(layout, zero, shard, offload, order), order)
            known = self._every[key] = tuple(found.items())
        return known

    def tails(
        self,
        layout: Layout,
        sharings: tuple[tuple[int, int | None], ...],
        offload: tuple[Offload, ...],
        orders: tuple[str, ...],
        rank: tuple[RankParameters, RankParameters],
    ) -> tuple[Tail, ...]:
        """Return what some ways to share add to a rank, without those that add more than another.

        `sharings` are ZeRO stages with the size of a shard, `rank` is what it holds and trains.
        """
        key = (*degrees(layout), sharings, offload, orders, rank)
        known = self._tails.get(key)
        if known is None:
            ways = self.every(layout, sharings, offload, orders)
            every = {_tail(way, rank) for way, _ in ways}
            known = self._tails[key] = tuple(
                tail
                for tail in every
                if not any(other != tail and _adds_less(other, tail) for other in every)
            )
        return known


def degrees(layout: Layout) -> Key:
    """Return what decides the groups that share states, and the format of weights."""
    sizes = (layout.tp, layout.cp, layout.pp, layout.dp, layout.ep, layout.expert_tp)
    return (*sizes, layout.precision)


def _tail(way: Way, rank: tuple[RankParameters, RankParameters]) -> Tail:
    exposed = exposed_share(way.run)
    exchange = way.exchange(rank[1])
    gather_s, scatter_s = way.carried(*rank)
    carried = 2 * gather_s + scatter_s
    return Tail(
        exposed * exchange.gather_s, exposed * exchange.reduce_s, way.update_s(rank[1]), carried
    )


def scattered_share(microbatches: int, schedule: ScheduleKind) -> float:
    """Return for what share of microbatches ZeRO 2 scatters gradients.

    Those of every chunk's last are reduced as ZeRO 1 does.
    """
    return max(0.0, 1 - lasts_of(schedule) / microbatches)


def lasts_of(schedule: ScheduleKind) -> int:
    """Return how many microbatches are the last of a chunk: DualPipe's two have one each."""
    return 2 if schedule == "dualpipe" else 1


def exposed_share(run: Run) -> float:
    """Return the share of an exchange that shows at the least: an edge, and what hiding costs."""
    if not run.software.overlap_exchange:
        return 1.0
    edge = run.constants.bucket_exposed
    return edge + run.constants.sm_share * (1 - edge)


def _adds_less(one: Tail, other: Tail) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))
