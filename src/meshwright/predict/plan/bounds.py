"""What a step takes at the least when only its split of the GPUs is known.

Three bounds, each dearer and tighter: kernels with experts at their best; the same with the least
that tensor and context parallelism can cost in any order of the axes; the experts' own kernels and
the least that their exchange can cost.
"""

from collections import Counter
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from meshwright.predict.block_comm import (
    around_products,
    block_comm,
    exchange_s,
    expert_bytes,
    neighbours,
    place,
)
from meshwright.predict.block_time import Passes
from meshwright.predict.network import Op, Placement, collective_s
from meshwright.predict.plan.meshes import Core, Meshes, Spread
from meshwright.predict.plan.orders import expert_places, orders_of
from meshwright.predict.plan.profiles import Loads, Profiles
from meshwright.predict.plan.question import Question
from meshwright.predict.plan.room import Array
from meshwright.predict.plan.shapes import Key, Shapes
from meshwright.predict.run import Run
from meshwright.spec.layout import Layout
from meshwright.spec.model import Experts

_ANYWHERE = Spread(1, 1)
_BEHIND = Passes(0.0, float("inf"), float("inf"))
"""Gradients that hide all communication that they can hide."""


class Bounds:
    """Lower bounds of one question's splits."""

    def __init__(
        self, question: Question, meshes: Meshes, shapes: Shapes, profiles: Profiles
    ) -> None:
        self.question, self.meshes, self.shapes, self.profiles = question, meshes, shapes, profiles
        counts, ahead = Counter(question.model.layer_names), question.model.multi_token
        if ahead is not None:
            counts[ahead.block] += ahead.depth
        self._often = np.array([counts[block.name] for block in question.model.blocks], float)
        """Layers of every kind."""
        self._calm: dict[Key, dict[str, float]] = {}
        self._orders: dict[Key, dict[object, str]] = {}
        self._placed: dict[Key, set[tuple[Placement, ...]]] = {}

    def kernels_s(self, core: Core) -> float:
        """Return the least that the kernels of a core take, wherever its experts lie."""
        kernels, least = self.shapes.kernels, float("inf")
        for split in self._splits(core):
            run = self._run(core, _ANYWHERE, split)
            passes = [kernels.least(run, block) for block in run.model.blocks]
            least = min(least, float(self._evenly(run, _columns([passes]))[0]))
        return least

    def core_s(self, core: Core, limit_s: float) -> float:
        """Return the same with communication and with what memory forces on it, below a limit."""
        every = [self._with_memory(core, None, split, limit_s) for split in self._splits(core)]
        return float(np.min(every))

    def meshes_s(self, core: Core, limit_s: float) -> list[tuple[Spread, float]]:
        """Return the same for every place of its experts."""
        spreads = self.meshes.spreads(core)
        if not spreads:
            return []
        every = [self._with_memory(core, spreads, split, limit_s) for split in self._splits(core)]
        return list(zip(spreads, np.min(every, axis=0).tolist(), strict=True))

    def _splits(self, core: Core) -> set[bool]:
        return {split for split, _ in self.meshes.contexts(core.tp, core.cp)}

    def _run(self, core: Core, spread: Spread, split: bool) -> Run:
        layout = self.shapes.layout(core, spread)
        kinds = [kind for one, kind in self.meshes.contexts(core.tp, core.cp) if one == split]
        # Whoever gathers all keys and values at once keeps more of them.
        kind = min(kinds, key=lambda one: one == "allgather")
        return self.question.run(
            replace(
                layout,
                sequence_parallel=split,
                cp_kind=kind,
                overlap_tp=self._overlaps(split),
                zero=3,
            )
        )

    def _overlaps(self, split: bool) -> bool:
        """Tell whether tensor-parallel communication may run beside products."""
        return split and max(self.question.space.allowed("overlap_tp") or (False,))

    def _evenly(self, run: Run, columns: Array, exchanges: "_Exchanges | None" = None) -> Array:
        """Return what variants take where passes are spread evenly, or one goes there and back."""
        ends, pp = self.shapes.kernels.ends(run), run.layout.pp
        whole = self._often @ columns.sum(axis=1) + sum(end.forward + end.backward for end in ends)
        trip = self._often @ columns[:, :2].sum(axis=1)
        trip = trip + sum(end.forward + end.input_gradient for end in ends)
        if exchanges is not None:
            # Side by side with others, all passes of a rank hide the exchange together.
            together, hides = self._often @ exchanges.more, self._often @ exchanges.hides
            behind = run.constants.expert_hidden * (whole + together - hides)
            whole = np.minimum(whole, whole + together - np.minimum(hides, behind))
            trip = np.minimum(trip, trip + together - hides)
        even = run.microbatches * whole / pp
        return even if pp == 1 else np.maximum(even, trip)  # type: ignore[no-any-return]

    def _with_memory(
        self, core: Core, spreads: list[Spread] | None, split: bool, limit_s: float
    ) -> Array:
        """Return the least of each place of experts; None knows none, and takes the best."""
        runs = [self._run(core, spread, split) for spread in spreads or (_ANYWHERE,)]
        columns, exchanges, owner = self._variants(runs, known=spreads is not None)
        waits = self._comm(core, split)
        for kind, block in enumerate(self.question.model.blocks):
            columns[kind, 1] += waits.get(block.name, 0.0)
        least = self._evenly(runs[0], columns, exchanges)
        near = np.flatnonzero(least < limit_s)
        if near.size:
            loads = self._loads(runs[0], columns[:, :, near], exchanges.of(near))
            layouts = None if spreads is None else [runs[owner[one]].layout for one in near]
            every = self.profiles.least_s(core, runs[0], loads, layouts)
            least[near] = np.maximum(least[near], every.min(axis=0, initial=np.inf))
        best = np.full(len(runs), np.inf)
        np.minimum.at(best, owner, least)
        return best

    def _variants(
        self, runs: list[Run], *, known: bool
    ) -> tuple[Array, "_Exchanges", npt.NDArray[np.intp]]:
        """Return the passes of runs in every order that matters to experts, and whose they are."""
        kernels, blocks = self.shapes.kernels, self.question.model.blocks
        found = kernels.paced if known else kernels.least
        passes, exchanges, owner = list[list[Passes]](), list[tuple[_Exchange, ...]](), list[int]()
        for number, run in enumerate(runs):
            row = [found(run, block) for block in blocks]
            every = self._experts(run) if known else [(_NOTHING,) * len(blocks)]
            passes += [row] * len(every)
            exchanges += every
            owner += [number] * len(every)
        columns = _columns(passes)
        wait, exchange = np.array(exchanges).transpose(2, 1, 0)
        constants = runs[0].constants
        own = constants.expert_hidden * columns.sum(axis=1)
        alone = wait + exchange - (1 - constants.sm_share) * np.minimum(exchange, own)
        columns[:, 1] += alone
        return columns, _Exchanges(wait + exchange - alone, exchange), np.array(owner)

    def _loads(self, run: Run, columns: Array, exchanges: "_Exchanges") -> Loads:
        forward, inputs, weights = columns[:, 0], columns[:, 1], columns[:, 2]
        ends = np.array([[end.forward + end.backward] for end in self.shapes.kernels.ends(run)])
        ends = np.repeat(ends, columns.shape[2], axis=1)
        more, hides = np.zeros_like(ends), np.zeros_like(ends)
        ahead = self.question.model.multi_token
        if ahead is not None:
            row = [block.name for block in self.question.model.blocks].index(ahead.block)
            ends[1] += ahead.depth * columns[row].sum(axis=0)
            more[1] += ahead.depth * exchanges.more[row]
            hides[1] += ahead.depth * exchanges.hides[row]
        return Loads(
            forward, inputs + weights, inputs, ends, exchanges.hides, hides, exchanges.more, more
        )

    def _comm(self, core: Core, split: bool) -> dict[str, float]:
        """Return what each kind of layer waits for tensor and context parallelism at the least."""
        plain = self.shapes.layout(core, Spread())
        places = self._distinct(plain)
        # Splits of other ranks may put these groups in the same places.
        key = (core.tp, core.cp, core.microbatch, split, tuple(places))
        known = self._calm.get(key)
        if known is None:
            known = self._calm[key] = self._waits(plain, split, list(places.values()))
        return known

    def _waits(self, plain: Layout, split: bool, orders: list[str]) -> dict[str, float]:
        kinds = [kind for one, kind in self.meshes.contexts(plain.tp, plain.cp) if one == split]
        least: dict[str, tuple[float, float]] = {}
        # Expert layers may do without communication after their experts.
        blocks = [
            replace(block, mlp=None) if isinstance(block.mlp, Experts) else block
            for block in self.question.model.blocks
            if block.mixer is not None or not isinstance(block.mlp, Experts)
        ]
        for order in orders:
            for kind in kinds:
                layout = replace(
                    plain,
                    order=order,
                    sequence_parallel=split,
                    cp_kind=kind,
                    overlap_tp=self._overlaps(split),
                )
                run = self.question.run(layout)
                for block in blocks:
                    found = block_comm(run, block, _BEHIND)
                    tp, cp = least.get(block.name, (float("inf"), float("inf")))
                    tp = min(tp, found.tp_forward + found.tp_backward)
                    least[block.name] = tp, min(cp, found.cp_forward + found.cp_backward)
        return {name: sum(both) for name, both in least.items()}

    def _distinct(self, layout: Layout) -> dict[object, str]:
        """Return the places of tensor and context parallel groups, each with an order."""
        key = (layout.tp, layout.cp, layout.pp, layout.dp)
        known = self._orders.get(key)
        if known is None:
            known = self._orders[key] = {}
            for order in orders_of(self.question, layout):
                ordered, cluster = replace(layout, order=order), self.question.limited
                groups = place(cluster, ordered, "tp"), place(cluster, ordered, "cp")
                known.setdefault((groups, neighbours(cluster, ordered, "cp")), order)
        return known

    def _experts(self, run: Run) -> list[tuple["_Exchange", ...]]:
        """Return what layers of every kind exchange for their experts, in all orders worth it."""
        layout = run.layout
        key = (layout.experts_tp, layout.ep, layout.expert_dp, layout.pp)
        places = self._placed.get(key)
        if places is None:
            places = self._placed[key] = expert_places(self.question, layout, "tp", "ep")
        size, every = expert_bytes(run), set[tuple[_Exchange, ...]]()
        for shared, spread in places:
            wait = 0.0
            if layout.experts_tp > 1:
                wait = sum(around_products(run, _BEHIND, partial(_collective_s, shared, size)))
            every.add(
                tuple(
                    [
                        _Exchange(
                            wait, 4 * exchange_s(run, block.mlp, spread) if layout.ep > 1 else 0.0
                        )
                        if isinstance(block.mlp, Experts)
                        else _NOTHING
                        for block in run.model.blocks
                    ]
                )
            )
        return [one for one in every if not any(_no_more(other, one) for other in every - {one})]


class _Exchange(NamedTuple):
    """What one layer exchanges for its experts in both passes."""

    shared_s: float
    """Between the ranks of one expert."""
    spread_s: float
    """Between experts."""


_NOTHING = _Exchange(0.0, 0.0)


def _no_more(one: tuple[_Exchange, ...], other: tuple[_Exchange, ...]) -> bool:
    """Tell whether one order takes no more time for anything than another."""
    return all(
        a.shared_s <= b.shared_s and a.spread_s <= b.spread_s
        for a, b in zip(one, other, strict=True)
    )


class _Exchanges(NamedTuple):
    """What layers wait for their experts where passes run side by side, by kind and variant."""

    more: Array
    """Longer than each by itself, nothing hidden."""
    hides: Array
    """What of it all passes together may hide."""

    def of(self, some: Array) -> "_Exchanges":
        """Return those of some variants."""
        return _Exchanges(self.more[:, some], self.hides[:, some])


def _collective_s(place: Placement, size: float, op: Op) -> float:
    return collective_s(place, op, size)


def _columns(every: list[list[Passes]]) -> Array:
    """Return passes of variants by kind of layer, part and variant."""
    return np.array([[passes[:3] for passes in row] for row in every]).transpose(1, 2, 0)
