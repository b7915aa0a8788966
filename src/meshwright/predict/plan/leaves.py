"""Whole layouts of a shape with a schedule: recompute and sharing, each with a lower bound."""

from collections.abc import Iterator
from typing import NamedTuple

from msgspec.structs import replace

from meshwright.predict.bubble import ENDS_APART
from meshwright.predict.plan.burdens import exposed_share, scattered_share
from meshwright.predict.plan.frames import Frames, Staged
from meshwright.predict.plan.holdings import Stages
from meshwright.predict.plan.keepings import Keeping, keepings
from meshwright.predict.plan.pipes import Chunks, Floor, chunk_times, floors
from meshwright.predict.plan.question import Question
from meshwright.predict.plan.recomputes import NOTHING, Option
from meshwright.predict.plan.shapes import Shape
from meshwright.predict.plan.sharing import Shared, Sharing
from meshwright.predict.plan.transfers import Transfers
from meshwright.predict.run import Run
from meshwright.predict.stage_time import StageTime
from meshwright.predict.step import sharded_share
from meshwright.spec.layout import Layout


class Leaf(NamedTuple):
    """A whole layout with a lower bound of its step."""

    bound_s: float
    layout: Layout


class Leaves:
    """Finds the layouts of one question that fit."""

    def __init__(self, question: Question, frames: Frames) -> None:
        self.question, self.frames = question, frames
        self.sharings = frames.sharings
        self.tried = 0

    def of(self, shape: Shape, staged: Staged, limit_s: float) -> Iterator[Leaf]:
        """Yield the layouts that fit and may take less than a limit."""
        pipe, stages, frames = staged.pipe, staged.stages, self.frames
        layout = pipe.on(shape.layout)
        chunks = chunk_times(shape, frames.cuts, pipe.split)
        options = {
            keeping: [
                _Eased(option, least, floors(shape, pipe, chunks, more, stages.flying))
                for option in frames.options(shape, keeping)
                if (least := staged.least(keeping)[option.row]) is not None
                for more in (frames.more(option, pipe.split, least),)
            ]
            for keeping in keepings(self.question, layout)
        }
        keeping_of = {(zero, one.offload): one for one in options for zero in one.stages}
        for way in self.sharings.of(layout, shape.orders, stages):
            keeping = keeping_of[way.sharing.zero, way.sharing.offload]
            if keeping.offload:
                yield from self._away(shape, staged, way, keeping, limit_s)
                continue
            done = list[list[float]]()
            fewest: list[int | None] | None = None
            for option, least, easiest in options[keeping]:
                if _with_exchange(layout, shape, way, easiest) >= limit_s:
                    continue
                self.tried += 1
                if fewest is None:
                    fewest = staged.fewest(keeping, way.residents)
                layers = fewest[option.row]
                if layers is None:
                    continue
                more = frames.more(option, pipe.split, layers)
                if more is not None:
                    if any(all(a <= b for a, b in zip(one, more, strict=True)) for one in done):
                        continue
                    done.append(more)
                low = easiest
                if layers > least:
                    low = floors(shape, pipe, chunks, more, stages.flying)
                bound = _with_exchange(layout, shape, way, low)
                if bound < limit_s:
                    again = option.again.on(layout, self._covered(stages.deepest, layers))
                    known = _Least(bound, low, chunks, more)
                    yield from self._variants(again, way.sharing, stages, known, limit_s)
                if not layers:
                    break  # whatever computes something again is slower

    def _away(
        self, shape: Shape, staged: Staged, way: Shared, keeping: Keeping, limit_s: float
    ) -> Iterator[Leaf]:
        """Yield the same where something goes to the host."""
        pipe, stages, frames = staged.pipe, staged.stages, self.frames
        layout = pipe.on(shape.layout)
        chunks = chunk_times(shape, frames.cuts, pipe.split)
        transfers = Transfers(self.question.run(way.sharing.on(layout)))
        over = set[int]()
        for option, layers, moved in self._covers(shape, staged, way, keeping):
            if option.row in over:
                continue
            self.tried += 1
            more = frames.more(option, pipe.split, layers)
            low = floors(shape, pipe, chunks, more, stages.flying)
            if _with_exchange(layout, shape, way, low) >= limit_s:
                over.add(option.row)  # the more so on more layers
                continue
            moves = moved and staged.moved_bytes(keeping, option, layers, moved)
            late = transfers.delayed(chunks, more, moves or None)
            delayed = floors(shape, pipe, late, more, stages.flying)
            bound = _with_exchange(layout, shape, way, delayed)
            if bound < limit_s:
                again = option.again.on(layout, self._covered(stages.deepest, layers))
                some = moved if moved is not None and moved < stages.deepest else None
                again = replace(again, offload=keeping.offload, offload_layers=some)
                known = _Least(bound, low, chunks, more)
                yield from self._variants(again, way.sharing, stages, known, limit_s)

    def _covers(
        self, shape: Shape, staged: Staged, way: Shared, keeping: Keeping
    ) -> Iterator[tuple[Option, int, int | None]]:
        """Yield what fits: options, on how many layers, and of how many activations go.

        As few as fit, but where activations go: computing more of them again may pay, as that much
        less has to move.
        """
        options = self.frames.options(shape, keeping)
        if not keeping.moves_activations:
            fewest = staged.fewest(keeping, way.residents)
            for option in options:
                layers = fewest[option.row]
                if layers is not None:
                    yield option, layers, None
            return
        every = staged.away(keeping, way.residents)
        for option in options:
            counts = (0,) if option.again == NOTHING else range(1, staged.stages.deepest + 1)
            for layers in counts:
                moved = every[option.row][layers]
                if moved is not None:
                    yield option, layers, moved

    def _covered(self, deepest: int, layers: int) -> int | None:
        """Return the layers of a chunk to name; heads that look ahead have layers of their own."""
        whole = layers == deepest and self.question.model.multi_token is None
        return None if whole or not layers else layers

    def _variants(
        self, layout: Layout, sharing: Sharing, stages: Stages, least: "_Least", limit_s: float
    ) -> Iterator[Leaf]:
        """Yield one layout with every sound choice of overlap."""
        for one in self.sharings.variants(sharing):
            whole, bound = one.on(layout), least.bound_s
            if one.zero > 1:
                bound = max(bound, _carried(self.question.run(whole), stages, least))
            if bound < limit_s:
                for overlap in self._overlaps_sends(layout):
                    yield Leaf(bound, replace(whole, overlap_pp=overlap))

    def _overlaps_sends(self, layout: Layout) -> tuple[bool, ...]:
        """Return whether sends may run beside compute, where there are any."""
        if layout.pp == 1:
            return (layout.overlap_pp,)
        return self.question.space.allowed("overlap_pp") or ()


class _Least(NamedTuple):
    """What a layout takes at the least, whatever it overlaps."""

    bound_s: float
    low: list[Floor]
    chunks: Chunks
    more: list[float] | None


class _Eased(NamedTuple):
    """A recompute option on as few layers as any way to share allows."""

    option: Option
    layers: int
    low: list[Floor]


def _with_exchange(layout: Layout, shape: Shape, shared: Shared, low: list[Floor]) -> float:
    """Return the least a step takes with its exchange of gradients and parameters."""
    run, sharing, most = shape.run, shared.sharing, 0.0
    # Ranks that end apart update by themselves; others wait for the longest update.
    apart, longest = layout.schedule in ENDS_APART and layout.pp > 1, shared.update_s
    exposed = exposed_share(run)
    first = exposed if sharing.overlap_parameters else 1.0
    last = exposed if sharing.overlap_gradients else 1.0
    ranks = zip(shared.exchanges, low, shared.updates, strict=True)
    for (reduce_s, gather_s), (fill, busy, drain), update_s in ranks:
        begin, end = first * gather_s, last * reduce_s
        whole = (begin if begin > fill else fill) + busy + (end if end > drain else drain)
        most = max(most, whole + (update_s if apart else longest))
    return most


def _carried(run: Run, stages: Stages, least: _Least) -> float:
    """Return the least the busiest rank takes where passes wait for sharded states."""
    low, chunks, more = least.low, least.chunks, least.more
    rank = max(range(len(low)), key=lambda index: low[index].busy_s)
    own = stages.chunks[rank]
    forward = sum([chunks.forward[chunk] for chunk in own])
    backward = sum([chunks.backward[chunk] + (more[chunk] if more else 0.0) for chunk in own])
    stage = StageTime(forward, backward, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    wait = sharded_share(run, stage, *stages.ranks[rank])
    fill, busy, drain = low[rank]
    if run.layout.zero == 2:
        wait *= backward / (forward + backward)
        wait *= scattered_share(run.microbatches, run.layout.schedule)
    times = run.microbatches / (2 if run.layout.schedule == "dualpipe" else 1)
    return fill + busy + wait * times * (forward + backward) + drain
