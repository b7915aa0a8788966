"""How replicas share states: ZeRO stages, shard sizes, orders of the axes, what goes to the host.

A way to share is left out where another one needs no more memory on any rank and no more time for
any of its exchanges: the step's time grows with each of them. Overlapping an exchange never takes
longer than waiting for it, except where every pass gathers its parameters.
"""

from itertools import product
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.predict.buckets import Exchange
from meshwright.predict.memory import Resident
from meshwright.predict.plan.burdens import Way, Ways
from meshwright.predict.plan.holdings import Stages
from meshwright.predict.plan.keepings import Keeping, keepings
from meshwright.predict.plan.meshes import divisors
from meshwright.predict.plan.question import Question
from meshwright.spec.layout import Layout, Offload
from meshwright.spec.layout.ranks import mesh_shape


class Sharing(NamedTuple):
    """One way to share."""

    zero: int
    shard: int | None
    order: str
    overlap_gradients: bool
    overlap_parameters: bool
    offload: tuple[Offload, ...]

    def on(self, layout: Layout) -> Layout:
        """Return a layout that shares so."""
        return replace(layout, **self._asdict())


class Shared(NamedTuple):
    """One way to share with what it costs on some pipeline."""

    sharing: Sharing
    residents: tuple[Resident, ...]
    """Bytes on each kind of rank."""
    exchanges: tuple[Exchange, ...]
    """Of every rank."""
    carried: tuple[float, float]
    """What every pass gathers and scatters of a layer, on the rank that holds most."""
    updates: tuple[float, ...]
    """Seconds of every rank."""

    @property
    def update_s(self) -> float:
        """The longest update."""
        return max(self.updates)


class Sharings:
    """The ways to share of one question."""

    def __init__(self, question: Question, known: Ways) -> None:
        self.question, self.known = question, known
        self._known: dict[tuple[object, ...], tuple[Shared, ...]] = {}
        self._kinds: dict[tuple[object, ...], tuple[tuple[int, int | None], ...]] = {}

    def of(self, layout: Layout, orders: tuple[str, ...], stages: Stages) -> tuple[Shared, ...]:
        """Return the ways that no other beats."""
        key = (
            layout.tp, layout.cp, layout.dp, layout.pp, layout.ep, layout.expert_tp,
            layout.precision, layout.microbatch, orders, id(stages),
        )  # fmt: skip
        known = self._known.get(key)
        if known is None:
            every = [
                self._shared(way, order, layout.microbatch, stages)
                for keeping in keepings(self.question, layout)
                for way, order in self.known.every(
                    layout, self.kinds(layout, keeping), keeping.offload, orders
                )
            ]
            known = self._known[key] = _unbeaten(every)
        return known

    def overlaps(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Return whether gradients and parameters may travel behind compute, or not."""
        space = self.question.space
        gradients = space.allowed("overlap_gradients") or ()
        return gradients, space.allowed("overlap_parameters") or ()

    def variants(self, sharing: Sharing) -> list[Sharing]:
        """Return a way to share with every sound choice of overlap.

        Waiting is never faster, except where every pass of a short stage moves its states.
        """
        if sharing.zero < 2:
            return [sharing]
        return [
            sharing._replace(overlap_gradients=one, overlap_parameters=other)
            for one, other in product(*self.overlaps())
        ]

    def kinds(self, layout: Layout, keeping: Keeping) -> tuple[tuple[int, int | None], ...]:
        """Return the ZeRO stages of a keeping with the sizes of a shard."""
        key = (layout.dp, layout.cp, layout.tp, layout.pp, layout.order, keeping)
        known = self._kinds.get(key)
        if known is None:
            known = self._kinds[key] = tuple(
                (zero, shard) for zero in keeping.stages for shard in self._shards(layout, zero)
            )
        return known

    def _shards(self, layout: Layout, zero: int) -> list[int | None]:
        """Return the sizes of a group that shares one copy: all replicas, or some (hybrid)."""
        space, spread = self.question.space, layout.dp * layout.cp
        if not zero:
            return [None]
        found: list[int | None] = [None]
        for shard in divisors(spread)[1:-1]:
            try:
                mesh_shape(replace(layout, shard=shard))
            except InputError:
                continue
            found.append(shard)
        allowed: tuple[Any, ...] | None = space.allowed("shard")
        return found if allowed is None else [shard for shard in found if shard in allowed]

    def _shared(self, way: Way, order: str, microbatch: int, stages: Stages) -> Shared:
        different = dict.fromkeys(stages.ranks)
        largest = max(different, key=lambda rank: rank[0].total)
        layout = way.run.layout
        gradients, parameters = (max(flags) for flags in self.overlaps())
        return Shared(
            Sharing(layout.zero, layout.shard, order, gradients, parameters, layout.offload),
            tuple([way.resident(holding.rank, microbatch) for holding in stages.holdings]),
            tuple([way.exchange(trained) for _, trained in stages.ranks]),
            way.carried(*largest),
            tuple([way.update_s(trained) for _, trained in stages.ranks]),
        )


def _unbeaten(ways: list[Shared]) -> tuple[Shared, ...]:
    """Keep those that are better than every other in something.

    Ways that keep parameters whole are not held against those that shard them: these keep other
    activations. What goes to the host takes time that is not known here, so that such ways are held
    against their like only.
    """
    ways.sort(key=_time)
    kept: dict[object, list[Shared]] = {}
    for way in ways:
        sharing = way.sharing
        alike = (sharing.zero, sharing.shard, sharing.offload) if sharing.offload else ()
        rivals = kept.setdefault((sharing.zero == 3, alike), [])
        if not any(_beats(other, way) for other in rivals):
            rivals.append(way)
    return tuple([way for rivals in kept.values() for way in rivals])


def _time(way: Shared) -> float:
    return way.update_s + sum(way.carried) + sum(map(sum, way.exchanges))


def _beats(one: Shared, other: Shared) -> bool:
    """Tell whether one way takes no more time for anything and no more memory anywhere."""
    return (
        one.update_s <= other.update_s
        and one.carried[0] <= other.carried[0]
        and one.carried[1] <= other.carried[1]
        and all(_lighter(a, b) for a, b in zip(one.residents, other.residents, strict=True))
        and all(
            a.reduce_s <= b.reduce_s and a.gather_s <= b.gather_s
            for a, b in zip(one.exchanges, other.exchanges, strict=True)
        )
    )


def _lighter(one: Resident, other: Resident) -> bool:
    """Tell whether one rank needs no more than another, whatever its activations."""
    states = one.states.total <= other.states.total and one.releases >= other.releases
    rest = one.logits <= other.logits and one.buffers <= other.buffers
    return states and rest and one.update <= other.update and one.runtime <= other.runtime
