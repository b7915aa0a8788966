"""What every rank of a layout holds of a model's weights, box by box, from descriptions alone.

`policy.resharding` plans with it what the ranks of a run tell it of their own tensors. As many
bytes go the same ways, in fewer, larger pieces: matrices of a layer that both sides cut alike are
taken as one, and so are layers that lie on the same ranks, where there would be too many slices.
Vectors, biases and vision towers are small and counted whole on every rank. With ZeRO 3 a rank
keeps rows of its part, where a run cuts between any two numbers.

Of an adapter each matrix has a pair of its own, whole on every replica. Tensor-parallel ranks are
taken to have even parts of both, where runs keep the half that is not cut whole.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from meshwright.policy.resharding.tensor_box import TensorBox
from meshwright.policy.resharding.weight_transfer import RankShards, ShardsByTensor
from meshwright.spec.layout import Layout
from meshwright.spec.layout.pipeline_chunks import list_chunks, list_chunks_by_rank
from meshwright.spec.layout.ranks import get_coordinate, get_expert_coordinate, get_process_group
from meshwright.spec.model import Model, Weight
from meshwright.spec.workload import LoRASpec

MAX_SLICES = 10_000
"""About as many slices as a plan is made of, where layers can be taken together."""
_PAIRS = ("fp32",)
"""What runs keep adapters in."""
StorageFormats = tuple[str, ...]
"""How numbers are kept; where they are rounded twice, both formats in turn."""


class WeightHolders(NamedTuple):
    """Ranks that train, or those of one engine."""

    layout: Layout
    linear_formats: StorageFormats
    """Of linear layers."""
    other_formats: StorageFormats
    """Of experts, routers, embeddings, heads and vectors."""


class _Alike(NamedTuple):
    """Matrices that both sides cut in the same way."""

    kind: Literal["column", "row", "none", "expert"]
    shards: tuple[int, int]
    """Parts that tensor parallelism cuts them into, on either side."""
    along: int
    """The side that is not cut: what a column or row of a product has."""
    copies: int
    is_linear: bool


class _Run(NamedTuple):
    """Neighbouring layers of one kind, on one stage of either side."""

    first: int
    last: int
    block: str


def list_weight_boxes(
    model: Model, source: WeightHolders, target: WeightHolders, *, engines: int
) -> tuple[list[ShardsByTensor], ...]:
    """Return what each rank of the source holds, and each rank of one of so many engines."""
    layouts = source.layout, target.layout
    alike = {each.name: _alike(model, each.name, *layouts) for each in model.blocks}
    slices = sum(
        layers * max(1, of.shards[0] // of.shards[1]) * (layouts[0].ep if of.copies > 1 else 1)
        for block, layers in model.count_layers_by_block()
        for of in alike[block.name]
    )
    at_once = max(1, slices * engines * target.layout.gpus // MAX_SLICES)
    runs = _runs(model, layouts, at_once)
    return tuple(
        [
            dict(_Rank(model, side, number, rank).holds(runs, alike))
            for rank in range(side.layout.gpus)
        ]
        for number, side in enumerate((source, target))
    )


def list_adapter_boxes(
    model: Model, adapter: LoRASpec, source: Layout, target: Layout
) -> tuple[list[ShardsByTensor], ...]:
    """Return what each rank of the source holds of an adapter, and each rank of one engine."""
    runs = _runs(model, (source, target), model.layers)
    numbers = {
        block.name: sum(
            weight.copies * adapter.rank * (weight.fan_in + weight.fan_out)
            for weight in block.list_weights(model.hidden)
            if adapter.is_target(weight)
        )
        for block in model.blocks
    }

    def holds(layout: Layout, rank: int) -> ShardsByTensor:
        place = get_coordinate(layout, rank)
        mine = list_chunks_by_rank(layout, model.layers)[place.pp]
        return {
            f"{run.first}.adapter": _box(
                _PAIRS, [(run.last - run.first) * count], {0: (layout.tp, place.tp)}, 0, (1, 0)
            )
            for run in runs
            if any(each.first <= run.first < each.last for each in mine)
            if (count := numbers[run.block])
        }

    return tuple(
        [holds(layout, rank) for rank in range(layout.gpus)] for layout in (source, target)
    )


def _alike(model: Model, block: str, *layouts: Layout) -> Counter[_Alike]:
    """Return how long the sides are that are cut, summed over a block's matrices cut alike."""
    found: Counter[_Alike] = Counter()
    for weight in model.block(block).list_weights(model.hidden):
        shards = [_cuts(weight, each) for each in layouts]
        kind = "expert" if weight.part == "expert" else weight.split
        linear = weight.part not in ("expert", "router")
        sides = weight.fan_out, weight.fan_in
        cut, along = sides[::-1] if weight.split == "row" else sides
        found[_Alike(kind, (shards[0], shards[1]), along, weight.copies, linear)] += cut
    return found


def _cuts(weight: Weight, layout: Layout) -> int:
    return weight.count_shards(layout.effective_expert_tp if weight.part == "expert" else layout.tp)


def _runs(model: Model, layouts: Sequence[Layout], at_once: int) -> tuple[_Run, ...]:
    names = model.layer_names
    cuts = {0, model.layers}
    for layout in layouts:
        cuts |= {chunk.first for chunk in list_chunks(layout, model.layers)}
    cuts |= {at for at in range(1, model.layers) if names[at] != names[at - 1]}
    return tuple(
        _Run(at, min(at + at_once, last), names[at])
        for first, last in pairwise(sorted(cuts))
        for at in range(first, last, at_once)
    )


class _Rank:
    """One rank of a side."""

    def __init__(self, model: Model, side: WeightHolders, number: int, rank: int) -> None:
        self.model, self.side, self.number = model, side, number
        layout = side.layout
        self.place, self.among = get_coordinate(layout, rank), get_expert_coordinate(layout, rank)
        self.dense, self.sparse = _shards(layout, rank)

    def holds(
        self, runs: Sequence[_Run], alike: dict[str, Counter[_Alike]]
    ) -> Iterator[tuple[str, RankShards]]:
        """Yield everything that the rank holds."""
        model, layout = self.model, self.side.layout
        mine = list_chunks_by_rank(layout, model.layers)[self.place.pp]
        for run in runs:
            if not any(each.first <= run.first < each.last for each in mine):
                continue
            layers = run.last - run.first
            for number, (of, cut) in enumerate(alike[run.block].items()):
                yield f"{run.first}.{number}", self._matrices(of, cut, layers)
            block = model.block(run.block)
            biases = sum(w.fan_out * w.copies for w in block.list_weights(model.hidden) if w.bias)
            vectors = block.count_vector_parameters(model.hidden, model.norm) + biases
            yield f"{run.first}.vectors", self._vector(layers * vectors)
        first = any(each.has_embedding for each in mine)
        last = any(each.has_head for each in mine)
        norm = model.norm.parameters(model.hidden)
        if first and model.embedding_norm:
            yield "embedding_norm", self._vector(norm)
        if last and model.final_norm:
            yield "final_norm", self._vector(norm)
        if first or (last and model.tied):
            yield "embedding", self._table()
        if last and not model.tied:
            yield "head", self._table()
        if first and model.positions == "learned":
            yield (
                "positions",
                self._vector((model.max_positions + model.position_offset) * model.hidden),
            )
        if first and model.vision is not None:
            tower = model.vision
            projector = tower.projector.parameters(tower.hidden, model.hidden)
            yield "vision", self._vector(tower.parameters() + projector)

    def _matrices(self, of: _Alike, cut: int, layers: int) -> RankShards:
        """Return the rank's part of some matrices: rows first, then columns, as runs have them."""
        layout, shards = self.side.layout, of.shards[self.number]
        if of.kind == "expert":
            mine = {
                0: (layout.ep, self.among.ep),
                1: (shards, self.among.expert_tp * shards // layout.effective_expert_tp),
            }
            whole = [of.copies, cut, layers * of.along]
            return _box(self.side.other_formats, whole, mine, 2, self.sparse)
        kept = self.side.linear_formats if of.is_linear else self.side.other_formats
        # Where there are fewer parts than ranks, neighbours hold the same one.
        part = shards, self.place.tp * shards // layout.tp
        if of.kind == "row":
            return _box(kept, [layers * of.along, cut], {1: part}, 0, self.dense)
        return _box(kept, [layers * cut, of.along], {0: part}, 0, self.dense)

    def _table(self) -> RankShards:
        whole = [self.model.vocab, self.model.hidden]
        mine = (self.side.layout.tp, self.place.tp)
        return _box(self.side.other_formats, whole, {0: mine}, 0, self.dense)

    def _vector(self, size: int) -> RankShards:
        return _box(self.side.other_formats, [size], {}, 0, self.dense)


def _box(
    formats: StorageFormats,
    whole: list[int],
    cut: dict[int, tuple[int, int]],
    axis: int,
    shard: tuple[int, int],
) -> RankShards:
    """Return the part of a whole that a rank has, by what it cuts of which sides."""
    offsets, sizes = [0] * len(whole), list(whole)
    for along, (ranks, index) in (*cut.items(), (axis, shard)):
        each = -(-sizes[along] // ranks)
        first = min(index * each, sizes[along])
        offsets[along] += first
        sizes[along] = min(each, sizes[along] - first)
    return RankShards(formats, tuple(whole), (TensorBox(tuple(offsets), tuple(sizes)),))


def _shards(layout: Layout, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return over how many ranks dense and expert weights are spread, and which of them this is."""
    if layout.zero < 3 or layout.shard_degree == 1:
        return (1, 0), (1, 0)
    among = get_process_group(layout, rank, "shard")
    copies = layout.dp * layout.cp // layout.shard_degree
    experts = max(1, layout.expert_dp // copies)
    index = get_expert_coordinate(layout, rank).expert_dp % experts
    return (len(among), among.index(rank)), (experts, index)
