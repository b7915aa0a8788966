"""`WholeMatrices`: parameters of which ranks hold parts, each made whole on one rank for a while.

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

from meshwright.run.nn.build import build
from meshwright.run.nn.holding import Holding, Range
from meshwright.run.parallel.group import Group
from meshwright.run.parallel.holdings import holdings
from meshwright.run.parallel.spread import Spread
from meshwright.run.parallel.sync import FORMATS, Cut, Sync

Work = Callable[[str, Tensor], None]
"""Changes the whole parameter of a name in place."""
SENT = torch.bfloat16
"""Format of parts on their way to their owner."""


class Part(NamedTuple):
    """A parameter of which ranks hold parts."""

    name: str
    runs: tuple[Range, ...]
    """By rank of the shard group: what it has of the flattened slice, one behind the other."""
    slices: tuple[Holding, ...]
    """By rank of the tensor-parallel group: its slice of the whole."""


class Ways:
    """The ways of parts of some items to their owners, and back; owners take turns."""

    def __init__(self, group: Group, sizes: Sequence[Sequence[int]]) -> None:
        """`sizes` has for each item the elements that each rank of a group has of it."""
        self.group, self.sizes = group, sizes
        self.by_owner = [range(rank, len(sizes), group.size) for rank in range(group.size)]
        self.mine = self.by_owner[group.index]
        self.sent = [sum(sizes[item][group.index] for item in some) for some in self.by_owner]
        self.got = [sum(sizes[item][rank] for item in self.mine) for rank in range(group.size)]

    def there(self, parts: Sequence[Tensor]) -> list[list[Tensor]]:
        """Send this rank's part of each item; return all parts, by rank, of those it owns."""
        flat = torch.cat([parts[item] for some in self.by_owner for item in some])
        came = self.group.all_to_all(flat, self.sent, self.got)
        ranks = range(self.group.size)
        sizes = [self.sizes[item][rank] for rank in ranks for item in self.mine]
        pieces = torch.split(came, sizes)
        return [list(pieces[place :: len(self.mine)]) for place in range(len(self.mine))]

    def back(self, owned: Sequence[Sequence[Tensor]], empty: Tensor) -> list[Tensor]:
        """Return this rank's part of each item, of whose parts owners have all."""
        flat = torch.cat([empty, *(parts[r] for r in range(self.group.size) for parts in owned)])
        came = self.group.all_to_all(flat, self.got, self.sent)
        order = [item for some in self.by_owner for item in some]
        pieces = torch.split(came, [self.sizes[item][self.group.index] for item in order])
        return [piece for _, piece in sorted(zip(order, pieces, strict=True), key=lambda it: it[0])]


class WholeMatrices:
    """Some parameters of a rank, made whole in turn."""

    def __init__(self, spread: Spread, sync: Sync, names: Iterable[str]) -> None:
        """`names` are in the same order on all ranks, those that others alone update included."""
        mesh = spread.mesh
        self.dtype, self.device = FORMATS[mesh.layout.gradient_precision], mesh.device
        alone = Group("alone", (mesh.rank,), mesh.rank, None, mesh.journal)
        cuts, slices = sync.cuts(), _slices(spread)
        kinds: dict[bool, list[Part]] = {False: [], True: []}
        for name in names:
            elements = prod(spread.holdings[name].shape)
            runs = cuts[name].runs if name in cuts else (Range(0, elements),)
            kinds[spread.holdings[name].expert].append(Part(name, runs, slices[name]))
        self._kinds: list[tuple[Group, Group, list[Part]]] = []
        for expert, found in kinds.items():
            if found:
                cut: Cut | None = cuts.get(found[0].name)
                tp = mesh["expert_tp" if expert else "tp"]
                self._kinds.append((alone if cut is None else cut.group, tp, found))

    @property
    def needed(self) -> bool:
        """Whether ranks hold parts of anything."""
        return any(shards.size > 1 or tp.size > 1 for shards, tp, _ in self._kinds)

    @torch.no_grad()
    def __call__(self, parts: Mapping[str, Tensor], work: Work) -> None:
        """Have every parameter whole on one rank, let that change it, and renew this rank's part.

        `parts` has what this rank has of them, as the optimizer is given it.
        """
        for shards, tp, found in self._kinds:
            at_once = shards.size * tp.size
            for first in range(0, len(found), at_once):
                self._turn(shards, tp, found[first : first + at_once], parts, work)

    def _turn(
        self,
        shards: Group,
        tp: Group,
        some: Sequence[Part],
        parts: Mapping[str, Tensor],
        work: Work,
    ) -> None:
        """Work on as many parameters as there are owners."""
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        runs = Ways(shards, [[run.size for run in each.runs] for each in some])
        given = [parts.get(each.name, empty) for each in some]
        held = [torch.cat(one) for one in runs.there([_sent(each) for each in given])]
        mine = some[shards.index :: shards.size]
        if mine:  # else none of the tensor-parallel group owns a slice
            slices = Ways(tp, [[prod(one.shape) for one in each.slices] for each in mine])
            ours = zip(mine[tp.index :: tp.size], slices.there(held), strict=True)
            held = slices.back([self._worked(each, got, work) for each, got in ours], empty)
        pieces = [
            torch.split(one, [run.size for run in each.runs])
            for each, one in zip(mine, held, strict=True)
        ]
        for each, part in zip(some, runs.back(pieces, empty), strict=True):
            if len(part):
                parts[each.name].copy_(part.view(parts[each.name].shape))

    def _worked(self, each: Part, slices: Sequence[Tensor], work: Work) -> list[Tensor]:
        """Put a parameter together, let it be changed, and return the slices of it."""
        whole = torch.empty(each.slices[0].whole, dtype=self.dtype, device=self.device)
        for held, piece in zip(each.slices, slices, strict=True):
            local = piece.view(held.shape)
            for box in held.boxes():
                whole[_at(box.whole)] = local[_at(box.local)].to(self.dtype)
        work(each.name, whole)
        return [held.take(whole).reshape(-1) for held in each.slices]


def _sent(part: Tensor) -> Tensor:
    return part.reshape(-1).to(SENT)


def _at(ranges: Iterable[Range]) -> tuple[slice, ...]:
    return tuple(slice(each.start, each.stop) for each in ranges)


def _slices(spread: Spread) -> dict[str, tuple[Holding, ...]]:
    """Return how each rank of the tensor-parallel group holds this rank's parameters."""
    mesh, found = spread.mesh, {}
    whole = build(spread.decoder.model)
    by_rank = {
        rank: holdings(whole, mesh.layout, rank)
        for rank in {*mesh["tp"].ranks, *mesh["expert_tp"].ranks}
    }
    for name, own in spread.holdings.items():
        if name in spread.used_with:  # no matrix of the decoder's
            continue
        group = mesh["expert_tp" if own.expert else "tp"]
        held = tuple(by_rank[rank][name] for rank in group.ranks)
        found[name] = tuple(map(_of_experts, held)) if own.expert else held
    return found


def _of_experts(holding: Holding) -> Holding:
    """Return a slice of experts as one of these experts alone: others hold the others."""
    count = holding.shape[0]
    return replace(
        holding, whole=(count, *holding.whole[1:]), parts=((Range(0, count),), *holding.parts[1:])
    )
