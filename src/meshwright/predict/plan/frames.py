"""A frame: a split of the GPUs with its microbatch, and the schedules whose memory it allows.

Memory depends on the degrees, the microbatch and the schedule, not on where groups lie, so what has
to be computed again is found once for all shapes of a frame.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from meshwright.predict.memory import Resident
from meshwright.predict.plan.burdens import Ways, scattered_share
from meshwright.predict.plan.holdings import Holdings, Stages
from meshwright.predict.plan.keepings import Keeping, keepings
from meshwright.predict.plan.meshes import Core, Spread
from meshwright.predict.plan.pipes import PAIRED, Cuts, Floor, Pipe, Pipes, chunk_times, floors
from meshwright.predict.plan.profiles import Loads, Profiles
from meshwright.predict.plan.question import Question
from meshwright.predict.plan.recomputes import Option, Recomputes, Useful
from meshwright.predict.plan.room import Array, Needs, fewest_layers, fewest_of, fitting, needs_of
from meshwright.predict.plan.shapes import Shape, Shapes, quickest
from meshwright.predict.plan.sharing import Sharings
from meshwright.spec.layout import StateBytes

_ROUNDED = 2
"""Bytes that rounding two sizes may add to their difference."""


class Staged:
    """A schedule on the ranks of a frame."""

    def __init__(self, frames: "Frames", shape: Shape, pipe: Pipe) -> None:
        self.frames, self.shape, self.run, self.pipe = frames, shape, shape.run, pipe
        self._rooms: dict[bool, _Rooms] = {}
        self._least: dict[Keeping, list[int | None]] = {}
        self._away: dict[bool, list[tuple[Needs, ...]]] = {}

    @cached_property
    def stages(self) -> Stages:
        """What its ranks hold."""
        return self.frames.holdings.of(self.shape, self.pipe)

    def _room(self, sharded: bool) -> "_Rooms":
        known = self._rooms.get(sharded)
        if known is None:
            run = self.run
            if sharded:
                run = self.frames.question.run(replace(run.layout, zero=3))
            useful = self.frames.recomputes.useful(run)
            known = self._rooms[sharded] = _Rooms(useful, needs_of(run, useful.sizes, self.stages))
        return known

    def least(self, keeping: Keeping) -> list[int | None]:
        """Return on how few layers every option has to run where states are shared most."""
        known = self._least.get(keeping)
        if known is None:
            known = self._least[keeping] = self.fewest(keeping, self.lightest(keeping))
        return known

    def fewest(self, keeping: Keeping, residents: tuple[Resident, ...]) -> list[int | None]:
        """Return on how few layers every option has to run beside what ranks hold."""
        room = self._room(keeping.sharded)
        if keeping.moves_activations:
            fits = np.logical_or.reduce(self._moved(keeping, residents))
            return fewest_of(fits, room.useful.nothing)
        return fewest_layers(room.needs, residents, room.useful.nothing)

    def away(self, keeping: Keeping, residents: tuple[Resident, ...]) -> list[list[int | None]]:
        """Return for every option and number of layers the fewest whose activations have to go.

        The number of layers of the longest chunk stands for all; None says that none are enough.
        """
        fits = np.array(self._moved(keeping, residents))
        first: list[list[int]] = (fits.argmax(axis=0) + 1).tolist()
        possible: list[list[bool]] = np.logical_or.reduce(fits).tolist()
        return [
            [number if fit else None for number, fit in zip(*row, strict=True)]
            for row in zip(first, possible, strict=True)
        ]

    def moved_bytes(
        self, keeping: Keeping, option: Option, layers: int, away: int
    ) -> tuple[float, ...]:
        """Return what one chunk of every rank sends to the host for a microbatch."""
        whole, left = self._room(keeping.sharded).needs, self._needs_away(keeping)[away - 1]
        kinds = [
            float(a.kept[option.row, layers] - b.kept[option.row, layers] - _ROUNDED) / one.flying
            for a, b, one in zip(whole, left, self.stages.holdings, strict=True)
        ]
        return tuple([max(0.0, kinds[kind]) for kind in self.stages.kinds])

    def _moved(self, keeping: Keeping, residents: tuple[Resident, ...]) -> list[Array]:
        """Tell what fits, by on how many layers activations go to the host.

        A row for every option, a column for every number of layers it covers.
        """
        return [fitting(needs, residents) for needs in self._needs_away(keeping)]

    def _needs_away(self, keeping: Keeping) -> list[tuple[Needs, ...]]:
        """Return what activations need, by on how many layers they go to the host."""
        known = self._away.get(keeping.sharded)
        if known is None:
            sizes, deepest = self._room(keeping.sharded).useful.sizes, self.stages.deepest
            layout = replace(self.run.layout, offload=("activations",))
            layout = replace(layout, zero=3) if keeping.sharded else layout
            known = self._away[keeping.sharded] = [
                needs_of(self.frames.question.run(one), sizes, self.stages)
                for number in range(1, deepest + 1)
                for one in (replace(layout, offload_layers=number if number < deepest else None),)
            ]
        return known

    def lightest(self, keeping: Keeping) -> tuple[Resident, ...]:
        """Return what each kind of rank holds where states are shared most."""
        layout, ways = self.run.layout, self.frames.ways
        away = keeping.offload
        some = [ways.of(layout, zero, None, away, layout.order) for zero in keeping.stages]
        return tuple(
            [
                _lightest([way.resident(one.rank, layout.microbatch) for way in some])
                for one in self.stages.holdings
            ]
        )


def _lightest(every: list[Resident]) -> Resident:
    """Return what holds no more of anything than any of some."""
    if len(every) == 1:
        return every[0]
    return Resident(
        StateBytes(*map(min, zip(*(one.states for one in every), strict=True))),
        min(one.logits for one in every),
        min(one.buffers for one in every),
        min(one.update for one in every),
        min(one.runtime for one in every),
        any(one.releases for one in every),
    )


class _Rooms(NamedTuple):
    """What activations need where parameters are kept whole, or sharded fully."""

    useful: Useful
    needs: tuple[Needs, ...]


class Frame:
    """Degrees, microbatch and sequence parallelism, with the shapes that have them."""

    def __init__(self, core: Core, shapes: list[Shape], low: Array) -> None:
        self.core, self.shapes = core, shapes
        self.low = low
        """What every schedule (a row) takes at the least on every shape (a column)."""
        self.least_s = float(low.min(initial=np.inf))
        self.staged: list[Staged] = []

    @cached_property
    def shape(self) -> Shape:
        """One that is nowhere slower than any of them."""
        return quickest(self.shapes)


class Frames:
    """The frames of one question."""

    def __init__(self, question: Question, shapes: Shapes, pipes: Pipes) -> None:
        self.question, self.shapes, self.pipes = question, shapes, pipes
        self.recomputes = Recomputes(question, shapes.kernels)
        self.holdings, self.cuts = Holdings(question), Cuts(question.model.layer_names)
        self.ways = Ways(question)
        self.sharings = Sharings(question, self.ways)
        self.profiles = Profiles(question, pipes, self.recomputes)

    def of(self, core: Core, spread: Spread, limit_s: float) -> Iterator[Frame]:
        """Yield the frames of a mesh that may stay below a limit."""
        kinds: dict[tuple[bool, bool], list[str]] = {}
        for split, kind in self.shapes.meshes.contexts(core.tp, core.cp):
            # Those that gather all keys and values at once hold more of them.
            kinds.setdefault((split, kind == "allgather"), []).append(kind)
        plain = self.shapes.layout(core, spread)
        for (split, _), some in kinds.items():
            layout = replace(plain, sequence_parallel=split)
            shapes = [one for one in self.shapes.of(layout, some) if one.least_s() < limit_s]
            frame = self._frame(core, shapes, limit_s) if shapes else None
            if frame is not None:
                yield frame

    def _frame(self, core: Core, shapes: list[Shape], limit_s: float) -> Frame | None:
        """Return those of some shapes that may stay below a limit."""
        loads, run = Loads.of(shapes, self.profiles.names), shapes[0].run
        low = self.profiles.least_s(core, run, loads, [shape.layout for shape in shapes])
        low = np.maximum(low, [shape.least_s() for shape in shapes])
        near = np.flatnonzero(low.min(axis=0, initial=np.inf) < limit_s)
        return Frame(core, [shapes[one] for one in near], low[:, near]) if near.size else None

    def stage(self, frame: Frame, limit_s: float) -> float:
        """Find the schedules of a frame that fit and may stay below a limit; return the least."""
        best = float("inf")
        pipes = self.pipes.of(frame.core, frame.shape.run)
        for pipe, low in zip(pipes, frame.low.min(axis=1), strict=True):
            if low >= limit_s:
                continue
            staged = Staged(self, frame.shape, pipe)
            least = self.least_s(frame.shape, staged, limit_s)
            if least < limit_s:
                frame.staged.append(staged)
                best = min(best, least)
        return best

    def least_s(self, shape: Shape, staged: Staged, limit_s: float) -> float:
        """Return the least a step takes with the recompute that memory forces on it.

        What is not below a limit is not looked at closely.
        """
        chunks = chunk_times(shape, self.cuts, staged.pipe.split)
        easiest = floors(shape, staged.pipe, chunks, None, staged.stages.flying)
        if max(map(sum, easiest)) >= limit_s:
            return limit_s
        best = limit_s
        for keeping in keepings(self.question, shape.layout):
            bound = self._with_tail(shape, staged, easiest, keeping)
            if bound >= best:
                continue
            least = staged.least(keeping)
            for option in self.options(shape, keeping):
                layers = least[option.row]
                if layers is None:
                    continue
                if layers:
                    more = self.more(option, staged.pipe.split, layers)
                    low = floors(shape, staged.pipe, chunks, more, staged.stages.flying)
                    bound = self._with_tail(shape, staged, low, keeping)
                best = min(best, bound)
                if not layers:
                    break  # whatever computes something again is slower
        return best

    def _with_tail(self, shape: Shape, staged: Staged, low: list[Floor], keeping: Keeping) -> float:
        """Return the least that the slowest and the first rank take with their exchange."""
        kinds = self.sharings.kinds(shape.layout, keeping)
        slowest = max(range(len(low)), key=lambda rank: sum(low[rank]))
        share = shape.run.constants.sm_share
        layers = max(1, self.question.model.layers // shape.layout.pp)
        # Of DualPipe's two chunks each sees half of the microbatches.
        count = shape.microbatches / (2 if staged.pipe.schedule == "dualpipe" else 1)
        often = 1.0
        if keeping.most == 2:
            often = scattered_share(shape.microbatches, staged.pipe.schedule)
        # Passes side by side are shorter here than what hides the transfers of states.
        longer = 0.0 if staged.pipe.schedule in PAIRED else 1 - share
        most = sum(low[slowest])
        for rank in {0, slowest}:
            fill, busy, drain = low[rank]
            held = staged.stages.ranks[rank]
            some = self.ways.tails(shape.layout, kinds, keeping.offload, shape.orders, held)
            pace = busy / count / layers
            least = float("inf")
            for before, after, update, carried in some:
                # What travels with a layer takes a share of the chip, and time where it is longer.
                wait = share * carried + longer * max(0.0, carried - pace)
                passes = busy + wait * layers * count * often
                whole = max(fill, before) + passes + max(drain, after) + update
                least = min(least, whole)
            most = max(most, least)
        return most

    def options(self, shape: Shape, keeping: Keeping) -> tuple[Option, ...]:
        """Return what may be computed again."""
        key = keeping.sharded, keeping.moves_activations
        known = shape.options.get(key)
        if known is None:
            run = shape.run
            if keeping.sharded:
                run = self.question.run(replace(shape.layout, zero=3))
            # Where activations go to the host, an option that keeps more may need less at once.
            whole = keeping.moves_activations
            known = shape.options[key] = self.recomputes.of(run, shape.layers, whole=whole)
        return known

    def more(self, option: Option, split: tuple[int, ...], layers: int) -> list[float] | None:
        """Return what the backward of every chunk takes longer."""
        if not layers:
            return None
        heads, sizes = self.question.model.multi_token, split
        whole = self.cuts.sums(split, option.seconds)
        if heads is not None:
            sizes = (*split[:-1], split[-1] + heads.depth)
            whole[-1] += heads.depth * option.seconds[heads.block]
        return [
            one if layers >= size else layers / size * one
            for size, one in zip(sizes, whole, strict=True)
        ]
