"""What the ranks of a pipeline hold: layers by kind, parameters, microbatches in flight.

Ranks that hold the same differ at most in what is in flight, and the one with most of it needs most
memory: it stands for all of them where memory is the question.
"""

from collections import Counter
from typing import NamedTuple

from meshwright.predict.memory import Rank, in_flight, ranks_of
from meshwright.predict.plan.pipes import Pipe
from meshwright.predict.plan.question import Question
from meshwright.predict.plan.shapes import Shape
from meshwright.spec.layout import Layout, RankParameters


class Holding(NamedTuple):
    """What some ranks hold, at the most."""

    rank: Rank
    flying: int
    """Microbatches of one chunk each that are in flight at once."""
    covered: list[Counter[str]]
    """By how many layers of each chunk recompute covers: the layers of every kind that it does."""


class Stages(NamedTuple):
    """The ranks of a pipeline."""

    ranks: tuple[tuple[RankParameters, RankParameters], ...]
    """What every rank holds, and what of it is trained."""
    holdings: tuple[Holding, ...]
    """One for every different kind of rank."""
    kinds: tuple[int, ...]
    """Which of them stands for every rank."""
    chunks: tuple[tuple[int, ...], ...]
    """The chunks of every rank, by their place along the model."""
    flying: tuple[int, ...]
    """Microbatches of one chunk each that every rank has in flight at the most."""
    deepest: int
    """Layers of the longest chunk."""


class Holdings:
    """The pipelines of one question."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._known: dict[tuple[object, ...], Stages] = {}

    def of(self, shape: Shape, pipe: Pipe) -> Stages:
        """Return what the ranks of a shape with a schedule hold."""
        layout, count = shape.layout, shape.microbatches
        flying = count if pipe.schedule == "gpipe" else min(count, 2 * layout.pp)
        key = (layout.tp, layout.ep, layout.expert_tp, layout.pp, *pipe[:3], flying)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._stages(pipe.on(layout), count)
        return known

    def _stages(self, layout: Layout, microbatches: int) -> Stages:
        model = self.question.model
        names = model.layer_names
        ranks = ranks_of(self.question.run(layout))
        most: dict[object, Holding] = {}
        deepest, every, keys = 0, list[int](), list[object]()
        for number, rank in enumerate(ranks):
            chunks = rank.chunks
            key = tuple((names[c.first : c.last], c.has_embedding, c.has_head) for c in chunks)
            keys.append(key)
            flying = in_flight(layout, number, microbatches)
            every.append(flying)
            deepest = max(deepest, *(chunk.last - chunk.first for chunk in chunks))
            known = most.get(key)
            if known is None:
                rows = [names[chunk.first : chunk.last] for chunk in chunks]
                longest = max(map(len, rows))
                covered = [
                    Counter(name for row in rows for name in row[:count])
                    for count in range(longest + 1)
                ]
                most[key] = Holding(rank, flying, covered)
            elif flying > known.flying:
                most[key] = known._replace(flying=flying)
        held = tuple((rank.parameters, rank.trained) for rank in ranks)
        places = tuple(tuple(chunk.position for chunk in rank.chunks) for rank in ranks)
        row = list(most)
        kinds = tuple(row.index(key) for key in keys)
        return Stages(held, tuple(most.values()), kinds, places, tuple(every), deepest)
