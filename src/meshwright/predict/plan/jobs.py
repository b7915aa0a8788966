"""Every body of a question's layouts with its ways to share, told apart by whether they fit.

A body is all of a layout but how replicas share states. Memory depends neither on where groups lie
nor on what overlaps, so it is decided once for all bodies that differ in nothing else, for every
set of recomputed operations and every number of layers at once (`room`).
"""

from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.predict.bubble import hop_s
from meshwright.predict.memory import layer_bytes
from meshwright.predict.plan.burdens import Way, Ways
from meshwright.predict.plan.holdings import Holdings, Stages
from meshwright.predict.plan.meshes import Core, Meshes, divisors
from meshwright.predict.plan.orders import inside_of, orders_of
from meshwright.predict.plan.pipes import Pipe, Pipes
from meshwright.predict.plan.question import Question
from meshwright.predict.plan.recomputes import Again, choices
from meshwright.predict.plan.room import Needs, Sizes, needs_of
from meshwright.predict.plan.shapes import Layers, Shape, Shapes
from meshwright.predict.plan.sharing import Sharing
from meshwright.predict.run import Run
from meshwright.spec.layout import Layout
from meshwright.spec.layout.ranks import mesh_shape

Key = tuple[object, ...]


class Body(NamedTuple):
    """All of a layout but how replicas share states and what is sent beside compute."""

    degrees: Layout
    pipe: Pipe
    again: Again
    covered: int | None
    """Layers of a chunk that compute again; None for all."""

    def layout(self) -> Layout:
        """Return it as a layout, all else as it comes."""
        return self.again.on(self.pipe.on(self.degrees), self.covered)


class Shares(NamedTuple):
    """One way to share, with everything that may overlap in it."""

    zero: int
    shard: int | None
    way: Way
    sharings: tuple[Sharing, ...]


class Job(NamedTuple):
    """A body with the ways to share that fit beside it, and those that do not."""

    body: Body
    shape: Shape
    stages: Stages
    fitting: list[Shares]
    other: list[Shares]


class Jobs:
    """The bodies of one question."""

    def __init__(self, question: Question) -> None:
        self.question, self.space = question, question.space
        self.meshes = Meshes(question)
        self.shapes = Shapes(question, self.meshes)
        self.pipes = Pipes(self.meshes, self.shapes.kernels)
        self.holdings, self.ways = Holdings(question), Ways(question)
        self._agains = choices(question)
        self._sizes: dict[Key, Sizes] = {}
        self._shares: dict[Key, list[Shares]] = {}

    def allowed(self, name: str, applies: bool) -> tuple[Any, ...]:
        """Return the values of a switch, its usual one where it has no effect."""
        return (self.space.allowed(name) or ()) if applies else (getattr(self.space.base, name),)

    def of(self, core: Core) -> Iterator[Job]:
        """Yield every body with the degrees of a core."""
        for spread, (split, kind) in product(
            self.meshes.spreads(core), self.meshes.contexts(core.tp, core.cp)
        ):
            plain = self.shapes.layout(core, spread)
            plain = replace(plain, sequence_parallel=split, cp_kind=kind)
            shapes = [(shape, self._shared(shape)) for shape in self._shapes(plain)]
            ways = {(one.zero, one.shard): one.way for _, some in shapes for one in some}
            for pipe in self.pipes.of(core, self.question.run(plain)) if shapes else ():
                stages = self.holdings.of(shapes[0][0], pipe)
                fits = self._fits(plain, stages, ways)
                for row, again in enumerate(self._agains):
                    for covered in self._covered(again, stages.deepest):
                        column = stages.deepest if covered is None else covered
                        column = column if again.recompute != "none" else 0
                        for shape, shares in shapes:
                            job = Job(
                                Body(shape.layout, pipe, again, covered), shape, stages, [], []
                            )
                            for one in shares:
                                fit = fits[one.zero, one.shard][row][column]
                                (job.fitting if fit else job.other).append(one)
                            yield job

    def _shapes(self, plain: Layout) -> Iterator[Shape]:
        """Yield the shapes with some degrees; orders that come to the same are of one shape."""
        kernels, orders = self.shapes.kernels, orders_of(self.question, plain)
        for tensor, experts in product(
            self.allowed("overlap_tp", plain.sequence_parallel),
            self.allowed("overlap_ep", plain.ep > 1),
        ):
            alike: dict[tuple[int, float], tuple[Run, Layers, list[str]]] = {}
            for order in orders:
                layout = replace(plain, order=order, overlap_tp=tensor, overlap_ep=experts)
                run = self.question.run(layout)
                inside = kernels.number(inside_of(self.question, run.layout))
                layers, hop = kernels.layers(run, inside), hop_s(run)
                alike.setdefault((id(layers), hop), (run, layers, []))[2].append(order)
            for (_, hop), (run, layers, some) in alike.items():
                yield Shape(run, tuple(some), layers, kernels.ends(run), hop)

    def _covered(self, again: Again, deepest: int) -> list[int | None]:
        """Return on how many layers of each chunk a set of operations may be computed again."""
        if again.recompute == "none":
            return [None]
        # Heads that look ahead have layers of their own: all of a chunk are not all there are.
        whole = self.question.model.multi_token is None
        return self.some_layers("recompute_layers", deepest, whole=whole)

    def some_layers(self, name: str, deepest: int, *, whole: bool) -> list[int | None]:
        """Return the numbers of layers per chunk that a field may have; None is all of them."""
        given = self.space.allowed(name)
        if given is None:
            return [*range(1, deepest), None if whole else deepest]
        different = {deepest if one is None else one: one for one in given}
        return [one for number, one in different.items() if number <= deepest]

    def _shared(self, shape: Shape) -> list[Shares]:
        """Return the ways to share states, in every order of a shape."""
        layout = shape.layout
        sizes = (layout.tp, layout.cp, layout.pp, layout.dp, layout.ep, layout.expert_tp)
        key = (*sizes, layout.precision, shape.orders)
        known = self._shares.get(key)
        if known is None:
            known = self._shares[key] = [
                self._share(replace(layout, order=order), zero, shard)
                for order in shape.orders
                for zero in self.space.allowed("zero") or ()
                if not zero or layout.dp * layout.cp > 1
                for shard in self._shards(layout, order, zero)
            ]
        return known

    def _share(self, layout: Layout, zero: int, shard: int | None) -> Shares:
        spread = layout.dp * layout.cp > 1
        flags = product(
            self.allowed("overlap_gradients", spread),
            self.allowed("overlap_parameters", spread and zero > 0),
        )
        way = self.ways.of(layout, zero, shard, (), layout.order)
        sharings = tuple(Sharing(zero, shard, layout.order, *both, ()) for both in flags)
        return Shares(zero, shard, way, sharings)

    def _shards(self, layout: Layout, order: str, zero: int) -> Iterator[int | None]:
        """Yield the sizes of a group that shares one copy of the states."""
        allowed = self.space.allowed("shard")
        if not zero:
            yield None
            return
        for shard in (None, *divisors(layout.dp * layout.cp)[1:-1]):
            if allowed is not None and shard not in allowed:
                continue
            try:
                mesh_shape(replace(layout, order=order, shard=shard))
            except InputError:
                continue  # no mesh has such groups
            yield shard

    def _fits(
        self, plain: Layout, stages: Stages, ways: dict[tuple[int, int | None], Way]
    ) -> dict[tuple[int, int | None], list[list[bool]]]:
        """Tell of every way to share what fits: by set of operations and layers they cover."""
        found, needs = {}, dict[bool, tuple[Needs, ...]]()
        for (zero, shard), way in ways.items():
            sharded = zero == 3
            if sharded not in needs:
                run = self.question.run(replace(plain, zero=3) if sharded else plain)
                needs[sharded] = needs_of(run, self._of_layers(run), stages)
            every = [
                need.fits(way.resident(holding.rank, plain.microbatch))
                for need, holding in zip(needs[sharded], stages.holdings, strict=True)
            ]
            found[zero, shard] = np.logical_and.reduce(every).tolist()
        return found

    def _of_layers(self, run: Run) -> Sizes:
        """Return what layers keep under every set of operations."""
        layout = run.layout
        key = (
            layout.tp, layout.cp, layout.cp_kind, layout.sequence_parallel, layout.ep,
            layout.expert_tp, layout.precision, layout.zero == 3,
        )  # fmt: skip
        known = self._sizes.get(key)
        if known is None:
            every = [layer_bytes(self.question.run(again.on(layout))) for again in self._agains]
            known = self._sizes[key] = Sizes(every)
        return known
