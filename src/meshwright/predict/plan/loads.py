"""What memory forces on a split of the GPUs before its schedule is known.

Whatever the schedule, some rank holds so many layers of so many microbatches. Where that does not
fit, layers are computed again, and saving a byte costs at least what the best operation to repeat
takes for it. So a lower bound of memory becomes one of time.
"""

from collections import Counter
from typing import NamedTuple

from msgspec.structs import replace

from meshwright.predict.buffers import MEMORY_CONSTANTS, runtime_bytes
from meshwright.predict.memory import room_bytes, schedule_in_flight
from meshwright.predict.plan.meshes import Core
from meshwright.predict.plan.pipes import Cuts, Pipes
from meshwright.predict.plan.question import Question
from meshwright.predict.plan.recomputes import Prices, Recomputes
from meshwright.predict.plan.shapes import Key, Layers
from meshwright.predict.run import Run
from meshwright.spec.layout import Layout
from meshwright.spec.layout.states import STATE_BYTES


class Load(NamedTuple):
    """The least that one rank has under any schedule, for every kind of layer."""

    layers: dict[str, float]
    """Layers that it runs for every microbatch."""
    held: dict[str, float]
    """Layers whose activations it holds at once, each microbatch in flight counted."""


class Loads:
    """The loads of one question."""

    def __init__(self, question: Question, pipes: Pipes, recomputes: Recomputes) -> None:
        self.question, self.pipes, self.recomputes = question, pipes, recomputes
        self._cuts = Cuts(question.model.layer_names)
        self._loads: dict[Key, tuple[Load, ...]] = {}
        self._prices: dict[Key, Prices] = {}
        self._weights: dict[Key, dict[str, float]] = {}

    def least_s(self, core: Core, run: Run, layers: Layers) -> float:
        """Return the least that a rank's passes take with the recompute that memory forces on it.

        `layers` is the least that one layer of every kind takes.
        """
        layout, least = run.layout, float("inf")
        for sharded in self._families(layout):
            prices = self._price(run, layers, sharded)
            room = room_bytes(run, runtime_bytes(run, MEMORY_CONSTANTS)) / run.tokens
            weights = self._weight_bytes(layout, sharded)
            most = 0.0
            for load in self._load(core, run):
                fixed = sum([often * weights[name] for name, often in load.layers.items()])
                again = _repeated_s(load, prices, room - fixed / run.tokens)
                own = sum(
                    [
                        often * (layers[name].passes.forward + layers[name].passes.backward)
                        for name, often in load.layers.items()
                    ]
                )
                most = max(most, run.microbatches * (own + again))
            least = min(least, most)
        return least

    def _families(self, layout: Layout) -> list[bool]:
        zeros = self.question.space.allowed("zero") or ()
        if layout.dp * layout.cp == 1:
            return [False]
        return [False] * any(zero < 3 for zero in zeros) + [True] * (3 in zeros)

    def _load(self, core: Core, run: Run) -> tuple[Load, ...]:
        """Return the least loads of the first rank and of one in the middle."""
        flying = min(run.microbatches, 2 * core.pp)
        key = (core.pp, flying, tuple(self.pipes.interleavings(core)), self.pipes.costs(run))
        known = self._loads.get(key)
        if known is None:
            # The first rank holds most microbatches; one in the middle has no odd layers.
            found: dict[int, list[Load]] = {0: [], core.pp // 2: []}
            for pipe in self.pipes.of(core, run):
                peaks = schedule_in_flight(pipe.on(run.layout), run.microbatches)
                cuts, ranks = self._cuts.of(pipe.split), pipe.ranks(core.pp)
                for rank, some in found.items():
                    own = ranks[rank]
                    kinds = Counter[str]()
                    for chunk in own:
                        kinds.update(dict(cuts[chunk]))
                    # Of DualPipe's two chunks each sees half of the microbatches.
                    halves = len(own) // pipe.virtual_stages
                    load = peaks[rank] / len(own)
                    some.append(
                        Load(
                            {name: often / halves for name, often in kinds.items()},
                            {name: often * load for name, often in kinds.items()},
                        )
                    )
            known = self._loads[key] = tuple(_least(some) for some in found.values())
        return known

    def _price(self, run: Run, layers: Layers, sharded: bool) -> Prices:
        layout = run.layout
        if (layout.zero == 3) != sharded:
            run = self.question.run(replace(layout, zero=3 if sharded else 0))
        key = (*self.recomputes.kernels.key(run), layout.cp_kind, sharded)
        known = self._prices.get(key)
        if known is None:
            known = self._prices[key] = self.recomputes.prices(run, layers)
        return known

    def _weight_bytes(self, layout: Layout, sharded: bool) -> dict[str, float]:
        """Return what the states of one layer take at the least, experts spread thinly."""
        key = (layout.tp, layout.precision, layout.pp == 1, sharded)
        known = self._weights.get(key)
        if known is None:
            known = self._weights[key] = self._states(layout, sharded)
        return known

    def _states(self, layout: Layout, sharded: bool) -> dict[str, float]:
        model, zeros = self.question.model, self.question.space.allowed("zero") or ()
        # One byte where products are in eight bits, as some devices keep no more.
        number = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0}.get(layout.precision, 1.0)
        if sharded:
            # Beside a pipeline gathered weights and gradients stay whole through the step.
            whole = 2.0 + STATE_BYTES[layout.gradient_precision]
            number = whole if layout.pp > 1 and self.question.workload.adapter is None else 0.0
        elif max(zeros) < 2 and self.question.workload.adapter is None:
            number += STATE_BYTES[layout.gradient_precision]
        return {
            block.name: number
            * sum(
                weight.per_rank(layout.tp)
                for weight in block.weights(model.hidden)
                if weight.part != "expert"
            )
            for block in model.blocks
        }


def _repeated_s(load: Load, prices: Prices, budget: float) -> float:
    """Return the seconds of recompute per microbatch that a budget of bytes per token forces."""
    lack = sum([often * prices.whole[name] for name, often in load.held.items()]) - budget
    if lack <= 0:
        return 0.0
    steps = [
        (load.held[name] * saved, load.layers[name] * seconds)
        for name, often in load.layers.items()
        if often
        for saved, seconds in prices.hulls[name]
    ]
    steps.sort(key=lambda step: step[1] / step[0] if step[0] else float("inf"))
    spent = 0.0
    for saved, seconds in steps:
        if saved >= lack:
            return spent + seconds * lack / saved
        lack -= saved
        spent += seconds
    return float("inf")  # not even everything computed again fits


def _least(loads: list[Load]) -> Load:
    """Return a load with no more of anything than any of some."""

    def least(parts: list[dict[str, float]]) -> dict[str, float]:
        names = {name for part in parts for name in part}
        return {name: min(part.get(name, 0.0) for part in parts) for name in names}

    return Load(least([load.layers for load in loads]), least([load.held for load in loads]))
