"""`MatrixGatherer`: parameters of which ranks hold parts, each made whole on one rank for a while.

Muon orthogonalises whole matrices. ZeRO leaves every rank of a shard group a run of a flattened
parameter, tensor parallelism every rank a slice; so parts go to an owner, and come back changed:

    runs      to the owner of a slice in the shard group
    slices    to the owner of the whole in the tensor-parallel group
    work      by that owner alone
    and back  the same ways

Owners take turns over all ranks that hold parts of the same layers, as many parameters at a time as
there are such ranks: each works on one, has no more than one whole, and every part travels once
each way. Replicas that hold the same parts do the same. Of experts the matrices of all that a rank
holds in a layer go together. Parts travel there in bfloat16, as which the work reads them, and back
in the format of gradients.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.sharding.shard_spec import IndexRange, ShardSpec
from meshwright.run.parallel.group_coordinator import GroupCoordinator
from meshwright.run.parallel.shard_specs import make_shard_specs
from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.run.parallel.zero.gradient_sync import GRADIENT_DTYPES, FlatSharding, Sync

MatrixUpdateFn = Callable[[str, Tensor], None]
"""Changes the whole parameter of a name in place."""
TRANSFER_DTYPE = torch.bfloat16
"""Format of parts on their way to their owner."""


class ShardedMatrix(NamedTuple):
    """A parameter of which ranks hold parts."""

    name: str
    flat_ranges: tuple[IndexRange, ...]
    """By rank of the shard group: what it has of the flattened slice, one behind the other."""
    shard_specs: tuple[ShardSpec, ...]
    """By rank of the tensor-parallel group: its slice of the whole."""


class GatherRoutes:
    """The ways of parts of some items to their owners, and back; owners take turns."""

    def __init__(self, group: GroupCoordinator, sizes: Sequence[Sequence[int]]) -> None:
        """`sizes` has for each item the elements that each rank of a group has of it."""
        self.group, self.sizes = group, sizes
        self.items_by_owner = [range(rank, len(sizes), group.size) for rank in range(group.size)]
        self.owned_items = self.items_by_owner[group.index]
        self.input_splits = [
            sum(sizes[item][group.index] for item in some) for some in self.items_by_owner
        ]
        self.output_splits = [
            sum(sizes[item][rank] for item in self.owned_items) for rank in range(group.size)
        ]

    def gather_to_owners(self, parts: Sequence[Tensor]) -> list[list[Tensor]]:
        """Send this rank's part of each item; return all parts, by rank, of those it owns."""
        flat = torch.cat([parts[item] for some in self.items_by_owner for item in some])
        came = self.group.all_to_all(flat, self.input_splits, self.output_splits)
        ranks = range(self.group.size)
        sizes = [self.sizes[item][rank] for rank in ranks for item in self.owned_items]
        pieces = torch.split(came, sizes)
        return [
            list(pieces[place :: len(self.owned_items)]) for place in range(len(self.owned_items))
        ]

    def scatter_from_owners(self, owned: Sequence[Sequence[Tensor]], empty: Tensor) -> list[Tensor]:
        """Return this rank's part of each item, of whose parts owners have all."""
        flat = torch.cat([empty, *(parts[r] for r in range(self.group.size) for parts in owned)])
        came = self.group.all_to_all(flat, self.output_splits, self.input_splits)
        order = [item for some in self.items_by_owner for item in some]
        pieces = torch.split(came, [self.sizes[item][self.group.index] for item in order])
        return [piece for _, piece in sorted(zip(order, pieces, strict=True), key=lambda it: it[0])]


class MatrixGatherer:
    """Some parameters of a rank, made whole in turn."""

    def __init__(self, sharded_model: ShardedModel, sync: Sync, names: Iterable[str]) -> None:
        """`names` are in the same order on all ranks, those that others alone update included."""
        mesh = sharded_model.mesh
        self.dtype, self.device = GRADIENT_DTYPES[mesh.layout.gradient_precision], mesh.device
        alone = GroupCoordinator("alone", (mesh.rank,), mesh.rank, None, mesh.flight_recorder)
        cuts, slices = sync.flat_shardings(), _slices(sharded_model)
        kinds: dict[bool, list[ShardedMatrix]] = {False: [], True: []}
        for name in names:
            elements = prod(sharded_model.shard_specs[name].shape)
            runs = cuts[name].flat_ranges if name in cuts else (IndexRange(0, elements),)
            kinds[sharded_model.shard_specs[name].is_expert].append(
                ShardedMatrix(name, runs, slices[name])
            )
        self._kinds: list[tuple[GroupCoordinator, GroupCoordinator, list[ShardedMatrix]]] = []
        for expert, found in kinds.items():
            if found:
                cut: FlatSharding | None = cuts.get(found[0].name)
                tp = mesh["expert_tp" if expert else "tp"]
                self._kinds.append((alone if cut is None else cut.group, tp, found))

    @property
    def is_needed(self) -> bool:
        """Whether ranks hold parts of anything."""
        return any(shards.size > 1 or tp.size > 1 for shards, tp, _ in self._kinds)

    @torch.no_grad()
    def __call__(self, parts: Mapping[str, Tensor], work: MatrixUpdateFn) -> None:
        """Have every parameter whole on one rank, let that change it, and renew this rank's part.

        `parts` has what this rank has of them, as the optimizer is given it.
        """
        for shards, tp, found in self._kinds:
            at_once = shards.size * tp.size
            for first in range(0, len(found), at_once):
                self._turn(shards, tp, found[first : first + at_once], parts, work)

    def _turn(
        self,
        shards: GroupCoordinator,
        tp: GroupCoordinator,
        some: Sequence[ShardedMatrix],
        parts: Mapping[str, Tensor],
        work: MatrixUpdateFn,
    ) -> None:
        """Work on as many parameters as there are owners."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        runs = GatherRoutes(shards, [[run.size for run in each.flat_ranges] for each in some])
        given = [parts.get(each.name, empty) for each in some]
        held = [torch.cat(one) for one in runs.gather_to_owners([_sent(each) for each in given])]
        mine = some[shards.index :: shards.size]
        if mine:  # else none of the tensor-parallel group owns a slice
            slices = GatherRoutes(
                tp, [[prod(one.shape) for one in each.shard_specs] for each in mine]
            )
            ours = zip(mine[tp.index :: tp.size], slices.gather_to_owners(held), strict=True)
            held = slices.scatter_from_owners(
                [self._worked(each, got, work) for each, got in ours], empty
            )
        pieces = [
            torch.split(one, [run.size for run in each.flat_ranges])
            for each, one in zip(mine, held, strict=True)
        ]
        for each, part in zip(some, runs.scatter_from_owners(pieces, empty), strict=True):
            if len(part):
                parts[each.name].copy_(part.view(parts[each.name].shape))

    def _worked(
        self, each: ShardedMatrix, slices: Sequence[Tensor], work: MatrixUpdateFn
    ) -> list[Tensor]:
        """Put a parameter together, let it be changed, and return the slices of it."""
        whole = torch.empty(each.shard_specs[0].global_shape, dtype=self.dtype, device=self.device)
        for held, piece in zip(each.shard_specs, slices, strict=True):
            local = piece.view(held.shape)
            for box in held.list_boxes():
                whole[_at(box.global_ranges)] = local[_at(box.local_ranges)].to(self.dtype)
        work(each.name, whole)
        return [held.select_local(whole).reshape(-1) for held in each.shard_specs]


def _sent(part: Tensor) -> Tensor:
    return part.reshape(-1).to(TRANSFER_DTYPE)


def _at(ranges: Iterable[IndexRange]) -> tuple[slice, ...]:
    return tuple(slice(each.start, each.stop) for each in ranges)


def _slices(sharded_model: ShardedModel) -> dict[str, tuple[ShardSpec, ...]]:
    """Return how each rank of the tensor-parallel group holds this rank's parameters."""
    mesh, found = sharded_model.mesh, {}
    whole = build_decoder(sharded_model.decoder.model)
    by_rank = {
        rank: make_shard_specs(whole, mesh.layout, rank)
        for rank in {*mesh["tp"].ranks, *mesh["expert_tp"].ranks}
    }
    for name, own in sharded_model.shard_specs.items():
        if name in sharded_model.gathered_with:  # no matrix of the decoder's
            continue
        group = mesh["expert_tp" if own.is_expert else "tp"]
        held = tuple(by_rank[rank][name] for rank in group.ranks)
        found[name] = tuple(map(_of_experts, held)) if own.is_expert else held
    return found


def _of_experts(holding: ShardSpec) -> ShardSpec:
    """Return a slice of experts as one of these experts alone: others hold the others."""
    count = holding.shape[0]
    return replace(
        holding,
        global_shape=(count, *holding.global_shape[1:]),
        ranges=((IndexRange(0, count),), *holding.ranges[1:]),
    )
