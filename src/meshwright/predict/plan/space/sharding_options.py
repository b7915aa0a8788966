"""How replicas share states: ZeRO stages, shard sizes, orders of the axes, what goes to the host.

A way to share is left out where another one needs no more memory on any rank and no more time for
any of its exchanges: the step's time grows with each of them. Overlapping an exchange never takes
longer than waiting for it, except where every pass gathers its parameters.
"""

from itertools import product
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.predict.memory.rank_memory import ResidentBytes
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.space.degree_splits import list_divisors
from meshwright.predict.plan.space.sharding_cost import ShardingCost, ShardingCosts
from meshwright.predict.plan.space.stage_contents import StageContents
from meshwright.predict.plan.space.zero_groups import ZeroGroup, list_zero_groups
from meshwright.predict.step.grad_buckets import DPCommTime
from meshwright.spec.layout import Layout, Offload
from meshwright.spec.layout.ranks import get_mesh_shape


class StateSharding(NamedTuple):
    """One way to share."""

    zero: int
    shard: int | None
    order: str
    overlap_gradients: bool
    overlap_parameters: bool
    offload: tuple[Offload, ...]

    def apply_to(self, layout: Layout) -> Layout:
        """Return a layout that shares so."""
        return replace(layout, **self._asdict())


class ShardingOption(NamedTuple):
    """One way to share with what it costs on some pipeline."""

    sharding: StateSharding
    resident_bytes: tuple[ResidentBytes, ...]
    """Bytes on each kind of rank."""
    dp_comm: tuple[DPCommTime, ...]
    """Of every rank."""
    per_pass_s: tuple[float, float]
    """What every pass gathers and scatters of a layer, on the rank that holds most."""
    updates_s: tuple[float, ...]
    """Seconds of every rank."""

    @property
    def update_s(self) -> float:
        """The longest update."""
        return max(self.updates_s)


class ShardingOptions:
    """The ways to share of one question."""

    def __init__(self, question: PlanQuestion, sharding_costs: ShardingCosts) -> None:
        self.question, self.sharding_costs = question, sharding_costs
        self._known: dict[tuple[object, ...], tuple[ShardingOption, ...]] = {}
        self._kinds: dict[tuple[object, ...], tuple[tuple[int, int | None], ...]] = {}

    def list_options(
        self, layout: Layout, orders: tuple[str, ...], stages: StageContents
    ) -> tuple[ShardingOption, ...]:
        """Return the ways that no other beats."""
        key = (
            layout.tp, layout.cp, layout.dp, layout.pp, layout.ep, layout.expert_tp,
            layout.precision, layout.microbatch, orders, id(stages),
        )  # fmt: skip
        known = self._known.get(key)
        if known is None:
            every = [
                self._shared(way, order, layout.microbatch, stages)
                for keeping in list_zero_groups(self.question, layout)
                for way, order in self.sharding_costs.list_distinct(
                    layout, self.list_shard_sizes(layout, keeping), keeping.offload, orders
                )
            ]
            known = self._known[key] = _unbeaten(every)
        return known

    def list_overlaps(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Return whether gradients and parameters may travel behind compute, or not."""
        space = self.question.space
        gradients = space.get_allowed("overlap_gradients") or ()
        return gradients, space.get_allowed("overlap_parameters") or ()

    def list_overlap_variants(self, sharing: StateSharding) -> list[StateSharding]:
        """Return a way to share with every sound choice of overlap.

        Waiting is never faster, except where every pass of a short stage moves its states.
        """
        if sharing.zero < 2:
            return [sharing]
        return [
            sharing._replace(overlap_gradients=one, overlap_parameters=other)
            for one, other in product(*self.list_overlaps())
        ]

    def list_shard_sizes(
        self, layout: Layout, keeping: ZeroGroup
    ) -> tuple[tuple[int, int | None], ...]:
        """Return the ZeRO stages of a keeping with the sizes of a shard."""
        key = (layout.dp, layout.cp, layout.tp, layout.pp, layout.order, keeping)
        known = self._kinds.get(key)
        if known is None:
            known = self._kinds[key] = tuple(
                (zero, shard)
                for zero in keeping.zero_stages
                for shard in self._shards(layout, zero)
            )
        return known

    def _shards(self, layout: Layout, zero: int) -> list[int | None]:
        """Return the sizes of a group that shares one copy: all replicas, or some (hybrid)."""
        space, spread = self.question.space, layout.dp * layout.cp
        if not zero:
            return [None]
        found: list[int | None] = [None]
        for shard in list_divisors(spread)[1:-1]:
            try:
                get_mesh_shape(replace(layout, shard=shard))
            except InputError:
                continue
            found.append(shard)
        allowed: tuple[Any, ...] | None = space.get_allowed("shard")
        return found if allowed is None else [shard for shard in found if shard in allowed]

    def _shared(
        self, way: ShardingCost, order: str, microbatch: int, stages: StageContents
    ) -> ShardingOption:
        different = dict.fromkeys(stages.ranks)
        largest = max(different, key=lambda rank: rank[0].total)
        layout = way.run.layout
        gradients, parameters = (max(flags) for flags in self.list_overlaps())
        return ShardingOption(
            StateSharding(layout.zero, layout.shard, order, gradients, parameters, layout.offload),
            tuple(
                [
                    way.count_resident_bytes(holding.stage_rank, microbatch)
                    for holding in stages.rank_contents
                ]
            ),
            tuple([way.predict_dp_comm(trained) for _, trained in stages.ranks]),
            way.predict_per_pass_s(*largest),
            tuple([way.optimizer_step_s(trained) for _, trained in stages.ranks]),
        )


def _unbeaten(ways: list[ShardingOption]) -> tuple[ShardingOption, ...]:
    """Keep those that are better than every other in something.

    Ways that keep parameters whole are not held against those that shard them: these keep other
    activations. What goes to the host takes time that is not known here, so that such ways are held
    against their like only.
    """
    ways.sort(key=_time)
    kept: dict[object, list[ShardingOption]] = {}
    for way in ways:
        sharing = way.sharding
        alike = (sharing.zero, sharing.shard, sharing.offload) if sharing.offload else ()
        rivals = kept.setdefault((sharing.zero == 3, alike), [])
        if not any(_beats(other, way) for other in rivals):
            rivals.append(way)
    return tuple([way for rivals in kept.values() for way in rivals])


def _time(way: ShardingOption) -> float:
    return way.update_s + sum(way.per_pass_s) + sum(map(sum, way.dp_comm))


def _beats(one: ShardingOption, other: ShardingOption) -> bool:
    """Tell whether one way takes no more time for anything and no more memory anywhere."""
    return (
        one.update_s <= other.update_s
        and one.per_pass_s[0] <= other.per_pass_s[0]
        and one.per_pass_s[1] <= other.per_pass_s[1]
        and all(
            _lighter(a, b) for a, b in zip(one.resident_bytes, other.resident_bytes, strict=True)
        )
        and all(
            a.reduce_s <= b.reduce_s and a.gather_s <= b.gather_s
            for a, b in zip(one.dp_comm, other.dp_comm, strict=True)
        )
    )


def _lighter(one: ResidentBytes, other: ResidentBytes) -> bool:
    """Tell whether one rank needs no more than another, whatever its activations."""
    states = (
        one.states.total <= other.states.total
        and one.gradients_replace_activations >= other.gradients_replace_activations
    )
    rest = one.logits_bytes <= other.logits_bytes and one.buffers_bytes <= other.buffers_bytes
    return (
        states
        and rest
        and one.update_bytes <= other.update_bytes
        and one.runtime_bytes <= other.runtime_bytes
    )
