"""The least that each schedule takes on a split of the GPUs, memory included, for all at once.

What a schedule does with the first and last rank and one between does not depend on how long
layers take, so it is worked out once: layers run and held, layers that come before, a microbatch's
trip to the end and back. A bound for all schedules is then a few products of arrays. Where the
layers held do not fit, some are computed again, and that takes at least what the lower hull of all
recompute options says.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from meshwright.predict.bubble import ENDS_APART
from meshwright.predict.buffers import MEMORY_CONSTANTS, runtime_bytes
from meshwright.predict.memory import room_bytes, schedule_in_flight
from meshwright.predict.plan.meshes import Core
from meshwright.predict.plan.pipes import PAIRED, Cuts, Pipe, Pipes
from meshwright.predict.plan.question import Question
from meshwright.predict.plan.recomputes import Prices, Recomputes
from meshwright.predict.plan.shapes import Key, Layers
from meshwright.predict.run import Run
from meshwright.spec.layout import Layout
from meshwright.spec.layout.states import STATE_BYTES

Array = npt.NDArray[Any]


class Profile(NamedTuple):
    """Numbers of layers, by schedule, rank and kind of layer."""

    run: Array
    """Run for every microbatch."""
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


class Profiles:
    """The profiles of one question."""

    def __init__(self, question: Question, pipes: Pipes, recomputes: Recomputes) -> None:
        self.question, self.pipes, self.recomputes = question, pipes, recomputes
        self.names = [block.name for block in question.model.blocks]
        self._cuts = Cuts(question.model.layer_names)
        counts = [question.model.layer_names.count(name) for name in self.names]
        self._main = counts.index(max(counts))
        """The kind of which there are most layers."""
        self._profiles: dict[Key, Profile] = {}
        self._prices: dict[Key, Prices] = {}
        self._weights: dict[Key, Array] = {}

    def least_s(
        self, core: Core, run: Run, layers: Layers, ends: tuple[float, float], *, experts: bool
    ) -> float:
        """Return the least that any schedule takes.

        `layers` is the least that one layer of every kind takes, `ends` what embedding and heads
        do; `experts` says whether the run knows where its experts lie.
        """
        profile = self._profile(core, run)
        passes = [layers[name].passes for name in self.names]
        forward = np.array([one.forward for one in passes])
        backward = np.array([one.backward for one in passes])
        inputs = np.array([one.input_gradient for one in passes])
        both = forward + backward
        own = profile.run @ both + profile.ends @ np.array(ends)
        # Forward passes may take longer than here, so idling counts where they are no more.
        ahead = profile.there - profile.meanwhile
        idle = np.where((ahead >= 0).all(axis=2), ahead @ forward + profile.back @ inputs, 0.0)
        once = profile.before @ both + idle
        least = float("inf")
        for sharded in self._families(run.layout):
            again = self._again(run, layers, profile, sharded=sharded, experts=experts)
            whole = (once + run.microbatches * (own + again)).max(axis=1)
            least = min(least, float(whole.min(initial=np.inf)))
        return least

    def _again(
        self, run: Run, layers: Layers, profile: Profile, *, sharded: bool, experts: bool
    ) -> Array:
        """Return the recompute per microbatch that memory forces on every schedule and rank.

        Kinds of layers that are few are taken to save all they can for nothing.
        """
        prices, main = self._price(run, layers, sharded), self._main
        weights = self._weight_bytes(run.layout, sharded=sharded, experts=experts)
        room = room_bytes(run, runtime_bytes(run, MEMORY_CONSTANTS))
        budget = (room - profile.run @ weights) / run.tokens
        hulls = [prices.hulls[name] for name in self.names]
        kept = np.array([prices.whole[name] for name in self.names])
        saved = np.array([sum(step[0] for step in hull) for hull in hulls])
        saved[main] = 0.0
        # The layer in backward has back what it did not keep, at least what layers save on average.
        lack = profile.held @ (kept - saved) + prices.working[self.names[main]] - budget
        spare = np.maximum(profile.held[:, :, main] - 1, 0.0)
        short = lack > 0
        each = np.full(lack.shape, np.inf)
        np.divide(lack, spare, out=each, where=short & (spare > 0))
        each[~short] = 0.0
        steps = np.cumsum([(0.0, 0.0), *hulls[main]], axis=0)
        seconds = np.interp(each, steps[:, 0], steps[:, 1], right=np.inf)
        again = np.full(lack.shape, np.inf)
        np.multiply(seconds, profile.run[:, :, main], out=again, where=np.isfinite(seconds))
        return again

    def _families(self, layout: Layout) -> list[bool]:
        zeros = self.question.space.allowed("zero") or ()
        if layout.dp * layout.cp == 1:
            return [False]
        return [False] * any(zero < 3 for zero in zeros) + [True] * (3 in zeros)

    def _profile(self, core: Core, run: Run) -> Profile:
        flying = min(run.microbatches, 2 * core.pp)
        schedules = tuple(self.pipes.interleavings(core))
        exact = run.microbatches if any(one.schedule == "gpipe" for one in schedules) else flying
        key = (core.pp, exact, schedules, self.pipes.costs(run))
        known = self._profiles.get(key)
        if known is None:
            every = [self._one(run, pipe) for pipe in self.pipes.of(core, run)]
            ranks = len(_watched(core.pp))
            widths = [len(self.names)] * 6 + [2]
            known = self._profiles[key] = Profile(
                *(
                    np.array([one[part] for one in every]).reshape((len(every), ranks, width))
                    for part, width in enumerate(widths)
                )
            )
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
            row = [whole / halves, whole * peaks[rank] / len(own)]
            if pp == 1 or not alone:
                row += [kinds[: own[0]].sum(axis=0), nothing, nothing, nothing]
            else:
                widest = kinds[own].max(axis=0) * peaks[rank]
                there, back = kinds[own[0] :].sum(axis=0), kinds[own[-1] + 1 :].sum(axis=0)
                row += [nothing, there, back, widest]
            row.append(np.array([0 in own, len(cuts) - 1 in own]) / halves)
            rows.append(row)
        return tuple(np.array([row[part] for row in rows]) for part in range(7))

    def _price(self, run: Run, layers: Layers, sharded: bool) -> Prices:
        layout = run.layout
        if (layout.zero == 3) != sharded:
            run = self.question.run(replace(layout, zero=3 if sharded else 0))
        key = (*self.recomputes.kernels.key(run), layout.cp_kind, sharded)
        known = self._prices.get(key)
        if known is None:
            known = self._prices[key] = self.recomputes.prices(run, layers)
        return known

    def _weight_bytes(self, layout: Layout, *, sharded: bool, experts: bool) -> Array:
        """Return what the states of one layer of every kind take at the least."""
        places = (layout.ep, layout.expert_tp) if experts else ()
        key = (layout.tp, layout.precision, layout.pp == 1, sharded, places)
        known = self._weights.get(key)
        if known is None:
            known = self._weights[key] = self._states(layout, sharded=sharded, experts=experts)
        return known

    def _states(self, layout: Layout, *, sharded: bool, experts: bool) -> Array:
        question, zeros = self.question, self.question.space.allowed("zero") or ()
        frozen = question.workload.adapter is not None
        # One byte where products are in eight bits, as some devices keep no more.
        number = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}.get(layout.precision, 1.0)
        gradients = 0.0 if frozen else float(STATE_BYTES[layout.gradient_precision])
        if sharded:
            # Beside a pipeline gathered weights and gradients stay whole through the step.
            number = 2.0 + gradients if layout.pp > 1 else 0.0
        elif max(zeros) < 2:
            number += gradients
        return np.array(
            [
                number
                * sum(
                    weight.per_rank(layout.experts_tp, layout.ep)
                    if weight.part == "expert"
                    else weight.per_rank(layout.tp)
                    for weight in block.weights(question.model.hidden)
                    if experts or weight.part != "expert"
                )
                for block in question.model.blocks
            ]
        )


def _watched(pp: int) -> tuple[int, ...]:
    """Return the ranks that bounds look at: both ends, and one in the middle."""
    return tuple(dict.fromkeys((0, pp // 2, pp - 1)))
