"""What ways to share cost a rank in bytes and seconds, each worked out once.

They depend on the degrees, on how states are shared and on what a rank holds, and many pipelines
have ranks that hold the same.
"""

from typing import NamedTuple

from msgspec.structs import replace

from meshwright.predict.memory.rank_memory import ResidentBytes, StageRank, count_resident_bytes
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.step.block_comm import build_group_placement
from meshwright.predict.step.grad_buckets import DPCommTime, predict_dp_comm
from meshwright.predict.step.optimizer_step import optimizer_step_s
from meshwright.predict.step.step_prediction import layer_zero3_comm_s
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.layout import Layout, Offload, RankParameters
from meshwright.spec.layout.choices import ScheduleKind

Key = tuple[object, ...]


class ShardingCost:
    """One way to share states with some degrees, and what it costs ranks that hold so much."""

    def __init__(self, question: PlanQuestion, layout: Layout) -> None:
        self.question, self.run = question, question.build_run(layout)
        self._residents: dict[Key, ResidentBytes] = {}
        self._exchanges: dict[RankParameters, DPCommTime] = {}
        self._carried: dict[RankParameters, tuple[float, float]] = {}
        self._updates: dict[RankParameters, float] = {}

    def count_resident_bytes(self, rank: StageRank, microbatch: int) -> ResidentBytes:
        """Return the bytes that such a rank holds."""
        key = (rank.parameters, rank.layers, rank.has_head, microbatch)
        known = self._residents.get(key)
        if known is None:
            run = self.run
            if run.layout.microbatch != microbatch:
                run = self.question.build_run(replace(run.layout, microbatch=microbatch))
            known = self._residents[key] = count_resident_bytes(run, rank)
        return known

    def predict_dp_comm(self, trained: RankParameters) -> DPCommTime:
        """Return the seconds that gradients and updated parameters travel once a step."""
        known = self._exchanges.get(trained)
        if known is None:
            known = self._exchanges[trained] = predict_dp_comm(self.run, trained)
        return known

    def predict_per_pass_s(
        self, held: RankParameters, trained: RankParameters
    ) -> tuple[float, float]:
        """Return the seconds one layer's states travel with every pass."""
        if self.run.layout.zero < 2:
            return 0.0, 0.0
        known = self._carried.get(held)
        if known is None:
            layers = max(1, self.run.model.layers // self.run.layout.pp)
            known = self._carried[held] = layer_zero3_comm_s(self.run, held, layers, trained)
        return known

    def optimizer_step_s(self, trained: RankParameters) -> float:
        """Return the seconds of an update."""
        known = self._updates.get(trained)
        if known is None:
            known = self._updates[trained] = optimizer_step_s(self.run, trained)
        return known


class ShardingBound(NamedTuple):
    """What sharing adds to the passes of a rank at the least."""

    param_gather_s: float
    """Waiting for parameters before the first pass."""
    grad_reduce_s: float
    """Waiting for gradients after the last."""
    update_s: float
    per_pass_s: float
    """What travels with the two passes of each layer, hidden or not."""


class ShardingCosts:
    """The ways to share of one question."""

    def __init__(self, question: PlanQuestion) -> None:
        self.question = question
        self._known: dict[Key, ShardingCost] = {}
        self._every: dict[Key, tuple[tuple[ShardingCost, str], ...]] = {}
        self._tails: dict[Key, tuple[ShardingBound, ...]] = {}

    def get(
        self, layout: Layout, zero: int, shard: int | None, offload: tuple[Offload, ...], order: str
    ) -> ShardingCost:
        """Return one way to share; orders that put its groups in the same places are one."""
        shared = replace(
            layout, zero=zero, shard=shard, offload=offload, order=order, recompute="none",
            recompute_ops=(), recompute_layers=None, schedule="1f1b", virtual_stages=1,
            stage_layers=None,
        )  # fmt: skip
        axes: tuple[str, ...] = ("dp-cp",) if shard is None else ("shard", "replicate")
        if self.question.model.moe is not None:
            axes += ("expert_dp",)
        places = tuple(
            [build_group_placement(self.question.usable_cluster, shared, axis) for axis in axes]
        )
        key = (*get_sharding_key(layout), zero, shard, offload, places)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = ShardingCost(self.question, shared)
        return known

    def list_distinct(
        self,
        layout: Layout,
        sharings: tuple[tuple[int, int | None], ...],
        offload: tuple[Offload, ...],
        orders: tuple[str, ...],
    ) -> tuple[tuple[ShardingCost, str], ...]:
        """Return the different ways to share of some kinds, each with an order that makes it."""
        key = (*get_sharding_key(layout), sharings, offload, orders)
        known = self._every.get(key)
        if known is None:
            found: dict[ShardingCost, str] = {}
            for zero, shard in sharings:
                for order in orders:
                    found.setdefault(self.get(layout, zero, shard, offload, order), order)
            known = self._every[key] = tuple(found.items())
        return known

    def list_bounds(
        self,
        layout: Layout,
        sharings: tuple[tuple[int, int | None], ...],
        offload: tuple[Offload, ...],
        orders: tuple[str, ...],
        rank: tuple[RankParameters, RankParameters],
    ) -> tuple[ShardingBound, ...]:
        """Return what some ways to share add to a rank, without those that add more than another.

        `sharings` are ZeRO stages with the size of a shard, `rank` is what it holds and trains.
        """
        key = (*get_sharding_key(layout), sharings, offload, orders, rank)
        known = self._tails.get(key)
        if known is None:
            ways = self.list_distinct(layout, sharings, offload, orders)
            every = {_tail(way, rank) for way, _ in ways}
            known = self._tails[key] = tuple(
                tail
                for tail in every
                if not any(other != tail and _adds_less(other, tail) for other in every)
            )
        return known


def get_sharding_key(layout: Layout) -> Key:
    """Return what decides the groups that share states, and the format of weights."""
    sizes = (layout.tp, layout.cp, layout.pp, layout.dp, layout.ep, layout.expert_tp)
    return (*sizes, layout.precision)


def _tail(way: ShardingCost, rank: tuple[RankParameters, RankParameters]) -> ShardingBound:
    exposed = min_exposed_share(way.run)
    exchange = way.predict_dp_comm(rank[1])
    gather_s, scatter_s = way.predict_per_pass_s(*rank)
    carried = 2 * gather_s + scatter_s
    return ShardingBound(
        exposed * exchange.gather_s,
        exposed * exchange.reduce_s,
        way.optimizer_step_s(rank[1]),
        carried,
    )


def grad_scatter_share(microbatches: int, schedule: ScheduleKind) -> float:
    """Return for what share of microbatches ZeRO 2 scatters gradients.

    Those of every chunk's last are reduced as ZeRO 1 does.
    """
    return max(0.0, 1 - count_last_microbatches(schedule) / microbatches)


def count_last_microbatches(schedule: ScheduleKind) -> int:
    """Return how many microbatches are the last of a chunk: DualPipe's two have one each."""
    return 2 if schedule == "dualpipe" else 1


def min_exposed_share(run: TrainingRun) -> float:
    """Return the share of an exchange that shows at the least: an edge, and what hiding costs."""
    if not run.framework.overlap_exchange:
        return 1.0
    edge = run.constants.exposed_bucket_share
    return edge + run.constants.comm_sm_share * (1 - edge)


def _adds_less(one: ShardingBound, other: ShardingBound) -> bool:
    return all(a <= b for a, b in zip(one, other, strict=True))
