"""What the ranks of a pipeline hold: layers by kind, parameters, microbatches in flight.

Ranks that hold the same differ at most in what is in flight, and the one with most of it needs most
memory: it stands for all of them where memory is the question.
"""

from collections import Counter
from typing import NamedTuple

from meshwright.predict.memory.rank_memory import StageRank, count_stage_in_flight, list_stage_ranks
from meshwright.predict.plan.question.plan_question import PlanQuestion
from meshwright.predict.plan.space.layer_shapes import LayerShape
from meshwright.predict.plan.space.pipeline_schedules import ScheduleOption
from meshwright.spec.layout import Layout, RankParameters


class RankContents(NamedTuple):
    """What some ranks hold, at the most."""

    stage_rank: StageRank
    in_flight: int
    """Microbatches of one chunk each that are in flight at once."""
    recomputed_layers: list[Counter[str]]
    """By how many layers of each chunk recompute covers: the layers of every kind that it does."""


class StageContents(NamedTuple):
    """The ranks of a pipeline."""

    ranks: tuple[tuple[RankParameters, RankParameters], ...]
    """What every rank holds, and what of it is trained."""
    rank_contents: tuple[RankContents, ...]
    """One for every different kind of rank."""
    contents_index: tuple[int, ...]
    """Which of them stands for every rank."""
    chunks: tuple[tuple[int, ...], ...]
    """The chunks of every rank, by their place along the model."""
    in_flight: tuple[int, ...]
    """Microbatches of one chunk each that every rank has in flight at the most."""
    max_chunk_layers: int
    """Layers of the longest chunk."""


class StageContentsCache:
    """The pipelines of one question."""

    def __init__(self, question: PlanQuestion) -> None:
        self.question = question
        self._known: dict[tuple[object, ...], StageContents] = {}

    def get(self, shape: LayerShape, pipe: ScheduleOption) -> StageContents:
        """Return what the ranks of a shape with a schedule hold."""
        layout, count = shape.layout, shape.microbatches
        flying = count if pipe.schedule == "gpipe" else min(count, 2 * layout.pp)
        key = (layout.tp, layout.ep, layout.expert_tp, layout.pp, *pipe[:3], flying)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._stages(pipe.apply_to(layout), count)
        return known

    def _stages(self, layout: Layout, microbatches: int) -> StageContents:
        model = self.question.model
        names = model.layer_names
        ranks = list_stage_ranks(self.question.build_run(layout))
        most: dict[object, RankContents] = {}
        deepest, every, keys = 0, list[int](), list[object]()
        for number, rank in enumerate(ranks):
            chunks = rank.chunks
            key = tuple((names[c.first : c.last], c.has_embedding, c.has_head) for c in chunks)
            keys.append(key)
            flying = count_stage_in_flight(layout, number, microbatches)
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
                most[key] = RankContents(rank, flying, covered)
            elif flying > known.in_flight:
                most[key] = known._replace(in_flight=flying)
        held = tuple((rank.parameters, rank.trained) for rank in ranks)
        places = tuple(tuple(chunk.position for chunk in rank.chunks) for rank in ranks)
        row = list(most)
        kinds = tuple(row.index(key) for key in keys)
        return StageContents(held, tuple(most.values()), kinds, places, tuple(every), deepest)
