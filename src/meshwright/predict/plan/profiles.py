"""The least that each schedule takes on a split of the GPUs, memory included, for all at once.

What a schedule does with the first and last rank and one between does not depend on how long
layers take, so it is worked out once: layers run and held, layers that come before, a microbatch's
trip to the end and back. A bound for all schedules is then a few products of arrays. Where the
layers held do not fit, some are computed again, and that takes at least what the lower hull of all
recompute options says.
"""

from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from meshwright.predict.bubble import ENDS_APART
from meshwright.predict.buffers import MEMORY_CONSTANTS, runtime_bytes
from meshwright.predict.memory import room_bytes, schedule_in_flight
from meshwright.predict.plan.burdens import lasts_of
from meshwright.predict.plan.keepings import Keeping, keepings
from meshwright.predict.plan.layer_states import LayerStates
from meshwright.predict.plan.meshes import Core
from meshwright.predict.plan.pipes import PAIRED, Cuts, Pipe, Pipes
from meshwright.predict.plan.question import Question
from meshwright.predict.plan.recomputes import Prices, Recomputes
from meshwright.predict.plan.room import Array
from meshwright.predict.plan.shapes import Key, Shape
from meshwright.predict.run import Run
from meshwright.spec.layout import Layout


class Profile(NamedTuple):
    """Numbers of layers, by schedule, rank and kind of layer."""

    run: Array
    """Run for every microbatch."""
    layers: Array
    """Whose states it keeps."""
    held: Array
    """Held at once, each microbatch in flight counted."""
    before: Array
    """In the chunks ahead of the rank's own, where they have to be passed both ways."""
    there: Array
    """From the rank's first chunk to the end, where it idles until the way back."""
    back: Array
    """On the way back to its last chunk."""
    meanwhile: Array
    """In the forward passes that it may run meanwhile."""
    ends: Array
    """Embedding and heads instead of kinds of layers: those that it runs."""
    first: Array
    """What covering all layers of the commonest kind costs at the least, as a share of what they
    cost by themselves: layers behind them share the price, which goes by numbers of layers."""
    paired: Array
    """Whether a schedule runs passes side by side."""
    lasts: Array
    """Last microbatches of a schedule's chunks, whose gradients ZeRO 2 does not scatter."""


class Loads(NamedTuple):
    """The least that layers take: a row for each kind of them, a column for each variant."""

    forward: Array
    backward: Array
    inputs: Array
    """What of backward the stage before waits for."""
    ends: Array
    """Embedding and heads instead of kinds of layers, both passes."""
    exchange: Array
    """What of both passes those that run side by side may hide."""
    ends_exchange: Array
    """The same of embedding and heads."""
    more: Array
    """What both passes take longer before that, where they run side by side."""
    ends_more: Array
    """The same of embedding and heads."""

    @classmethod
    def of(cls, shapes: list[Shape], names: list[str]) -> "Loads":
        """Return what the layers of shapes take."""
        every = np.array([[shape.parts[name] for name in names] for shape in shapes])
        forward, backward, weights, exchange = every.transpose(2, 1, 0)
        ends = np.array([[shape.first, shape.last] for shape in shapes]).transpose(2, 1, 0)
        # Where a switch hides the exchange, passes side by side hide no more of it.
        shown = np.array([not shape.layout.overlap_ep for shape in shapes])
        exchange, ends_exchange = exchange * shown, ends[3] * shown
        return cls(
            forward, backward, backward - weights, ends[0] + ends[1], exchange, ends_exchange,
            np.zeros_like(exchange), np.zeros_like(ends_exchange),
        )  # fmt: skip

    @property
    def variants(self) -> int:
        """How many there are."""
        return int(self.forward.shape[1])


class Profiles:
    """The profiles of one question."""

    def __init__(self, question: Question, pipes: Pipes, recomputes: Recomputes) -> None:
        self.question, self.pipes, self.recomputes = question, pipes, recomputes
        self.names = [block.name for block in question.model.blocks]
        self.states = LayerStates(question)
        self._cuts = Cuts(question.model.layer_names)
        counts = [question.model.layer_names.count(name) for name in self.names]
        self._main = counts.index(max(counts))
        """The kind of which there are most layers."""
        self._profiles: dict[Key, Profile] = {}
        self._prices: dict[Key, Prices] = {}

    def least_s(self, core: Core, run: Run, loads: Loads, layouts: list[Layout] | None) -> Array:
        """Return the least that every schedule (a row) takes with every variant (a column).

        `layouts` are those of the variants, None where nobody knows where their experts lie.
        """
        profile, count = self._profile(core, run), run.microbatches
        both = loads.forward + loads.backward
        own = profile.run @ both + profile.ends @ loads.ends
        inputs = profile.back @ loads.inputs
        if loads.exchange.any():
            paired = profile.paired[:, None, None]
            exchange = profile.run @ loads.exchange + profile.ends @ loads.ends_exchange
            more = profile.run @ loads.more + profile.ends @ loads.ends_more
            behind = run.constants.expert_hidden * (own + more - exchange)
            own = own + paired * (more - np.minimum(exchange, behind))
            inputs = inputs + paired * (profile.back @ (loads.more - loads.exchange))
        # Forward passes may take longer than here, so idling counts where they are no more.
        ahead = profile.there - profile.meanwhile
        idles = np.all(ahead >= 0, axis=2, keepdims=True)
        once = profile.before @ both + np.where(idles, ahead @ loads.forward + inputs, 0.0)
        least = np.full((len(own), loads.variants), np.inf)
        share = run.constants.sm_share
        # Passes side by side are shorter here than what hides the transfers of states.
        longer = (1 - share) * ~profile.paired[:, None, None]
        for keeping in keepings(self.question, run.layout):
            kept, travels = self._states(run, keeping, layouts)
            if keeping.moves_activations:
                room = room_bytes(run, runtime_bytes(run, MEMORY_CONSTANTS))
                busy = np.where(profile.layers @ kept <= room, own, np.inf)
            else:
                busy = own + self._again(run, profile, kept, layouts, keeping.sharded)
            if travels is not None:
                # What travels with a layer takes a share of the chip, and time where it is longer.
                carried = profile.run @ travels
                pace = np.where(np.isfinite(busy), busy, 0.0)
                wait = share * carried + longer * np.maximum(0.0, carried - pace)
                if keeping.most == 2:
                    wait = wait * np.maximum(0.0, 1 - profile.lasts[:, None, None] / count)
                busy = busy + wait
            least = np.minimum(least, (once + count * busy).max(axis=1))
        return least

    def _states(
        self, run: Run, keeping: Keeping, layouts: list[Layout] | None
    ) -> tuple[Array, Array | None]:
        """Return what states of a layer keep, and how long they travel if they do."""
        if layouts is None:
            return self.states.kept(run.layout, keeping, experts=False)[:, None], None
        kept = [self.states.kept(layout, keeping, experts=True) for layout in layouts]
        if keeping.most < 2:
            return np.array(kept).T, None
        travels = [self.states.travels_s(layout, keeping) for layout in layouts]
        return np.array(kept).T, np.array(travels).T

    def _again(
        self,
        run: Run,
        profile: Profile,
        states: Array,
        layouts: list[Layout] | None,
        sharded: bool,
    ) -> Array:
        """Return the recompute per microbatch that memory forces on schedules, ranks and variants.

        What layers keep depends on the places of their experts.
        """
        if layouts is None:
            return self._forced(run, profile, states, sharded)
        places = [self.recomputes.places(layout) for layout in layouts]
        again = np.empty((*profile.run.shape[:2], len(layouts)))
        for one in set(places):
            some = [index for index, place in enumerate(places) if place == one]
            alike = self.question.run(replace(layouts[some[0]], zero=run.layout.zero))
            again[:, :, some] = self._forced(alike, profile, states[:, some], sharded)
        return again

    def _forced(self, run: Run, profile: Profile, states: Array, sharded: bool) -> Array:
        """Return the same for variants that keep the same.

        Kinds of layers that are few are taken to save all they can for nothing.
        """
        prices, main = self._price(run, sharded), self._main
        room = room_bytes(run, runtime_bytes(run, MEMORY_CONSTANTS))
        budget = (room - profile.layers @ states) / run.tokens
        # The layer in backward has back what it did not keep, at least what layers save on average.
        has = profile.layers[:, :, main] > 0
        needs = profile.held @ prices.kept + prices.working * has
        lack = needs[:, :, None] - budget
        short = lack > 0
        if not short.any():
            return np.zeros(lack.shape)
        spare = np.broadcast_to(
            np.maximum(profile.held[:, :, main] - 1, 0.0)[:, :, None], lack.shape
        )
        each = np.full(lack.shape, np.inf)
        np.divide(lack, spare, out=each, where=short & (spare > 0))
        each[~short] = 0.0
        seconds = np.interp(each, prices.steps[:, 0], prices.steps[:, 1], right=np.inf)
        again = np.full(lack.shape, np.inf)
        runs = (profile.run[:, :, main] * profile.first[:, :, 0])[:, :, None]
        runs = np.broadcast_to(runs, lack.shape)
        np.multiply(seconds, runs, out=again, where=np.isfinite(seconds))
        return again

    def _profile(self, core: Core, run: Run) -> Profile:
        if run.layout.zero:
            run = self.question.run(replace(run.layout, zero=0))  # as shapes find their splits
        schedules = tuple(self.pipes.interleavings(core))
        flying = min(run.microbatches, 2 * core.pp)
        exact = run.microbatches if any(one.schedule == "gpipe" for one in schedules) else flying
        key = (core.pp, exact, schedules, self.pipes.costs(run))
        known = self._profiles.get(key)
        if known is None:
            pipes = self.pipes.of(core, run)
            every = [self._one(run, pipe) for pipe in pipes]
            ranks = len(_watched(core.pp))
            widths = [len(self.names)] * 7 + [2, 1]
            parts = [
                np.array([one[part] for one in every]).reshape((len(every), ranks, width))
                for part, width in enumerate(widths)
            ]
            parts.append(np.array([pipe.schedule in PAIRED for pipe in pipes], bool))
            parts.append(np.array([lasts_of(pipe.schedule) for pipe in pipes], float))
            known = self._profiles[key] = Profile(*parts)
        return known

    def _one(self, run: Run, pipe: Pipe) -> tuple[Array, ...]:
        """Return the profile of one schedule, a row for each rank that is watched."""
        pp = run.layout.pp
        cuts = self._cuts.of(pipe.split)
        kinds = np.array([[dict(cut).get(name, 0) for name in self.names] for cut in cuts], float)
        peaks = schedule_in_flight(pipe.on(run.layout), run.microbatches)
        ranks, rows = pipe.ranks(pp), []
        alone = pipe.schedule in ENDS_APART or pipe.schedule in PAIRED
        for rank in _watched(pp):
            own, nothing = ranks[rank], np.zeros(len(self.names))
            whole = kinds[own].sum(axis=0)
            # Of DualPipe's two chunks each sees half of the microbatches.
            halves = len(own) // pipe.virtual_stages
            row = [whole / halves, whole, whole * peaks[rank] / len(own)]
            if pp == 1 or not alone:
                row += [kinds[: own[0]].sum(axis=0), nothing, nothing, nothing]
            else:
                widest = kinds[own].max(axis=0) * peaks[rank]
                there, back = kinds[own[0] :].sum(axis=0), kinds[own[-1] + 1 :].sum(axis=0)
                row += [nothing, there, back, widest]
            row.append(np.array([0 in own, len(cuts) - 1 in own]) / halves)
            row.append(np.array([min(self._first(pipe.split, chunk) for chunk in own)]))
            rows.append(row)
        return tuple(np.array([row[part] for row in rows]) for part in range(9))

    def _first(self, split: tuple[int, ...], chunk: int) -> float:
        """Return the share of the commonest layers in a chunk where others come after one."""
        start = sum(split[:chunk])
        names = self.question.model.layer_names[start : start + split[chunk]]
        main = self.names[self._main]
        if main not in names or set(names[names.index(main) :]) == {main}:
            return 1.0
        return names.count(main) / len(names)

    def _price(self, run: Run, sharded: bool) -> Prices:
        layout = run.layout
        if (layout.zero == 3) != sharded:
            run = self.question.run(replace(layout, zero=3 if sharded else 0))
        places = self.recomputes.places(layout)
        key = (*self.recomputes.kernels.key(run), layout.cp_kind, places, sharded)
        known = self._prices.get(key)
        if known is None:
            main = run.model.blocks[self._main]
            known = self._prices[key] = self.recomputes.prices(run, main)
        return known


def _watched(pp: int) -> tuple[int, ...]:
    """Return the ranks that bounds look at: both ends, and one in the middle."""
    return tuple(dict.fromkeys((0, pp // 2, pp - 1)))
