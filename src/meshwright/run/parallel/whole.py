"""`Wholes`: whole parameters of a model that is spread over ranks, one at a time, on one of them.

    save(plain, folder, whole=Wholes(mine, plain))  # every rank; plain = build(model, dtype=…)

Who holds which part follows from the layout alone, so each rank knows what to send and the one that
gets it what to expect. A part that several ranks hold is sent by the first of them.
"""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.run.nn.build import build
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.holding import Box, Holding, Range
from meshwright.run.parallel.group import Message
from meshwright.run.parallel.holdings import holdings
from meshwright.run.parallel.spread import Spread
from meshwright.run.parallel.stage import keep_layers
from meshwright.spec.layout.ranks import coordinate, expert_coordinate
from meshwright.spec.layout.stages import rank_chunks


class _Sent(NamedTuple):
    """A part of a parameter and the rank that sends it."""

    rank: int
    box: Box


class Wholes:
    """Gathers parameters by name; all ranks ask for the same ones in the same order."""

    def __init__(self, mine: Spread, plain: Decoder, to: int = 0) -> None:
        """`plain` is the model in one piece, without memory; `to` is the rank that gets all."""
        self._mine, self._plain, self._to = mine, plain, to
        self._kinds = {name: value.dtype for name, value in plain.named_parameters()}
        self._parameters = dict(mine.decoder.named_parameters())

    @torch.no_grad()
    def __call__(self, name: str) -> Tensor | None:
        """Return the whole of a parameter on the rank that gets it, None on the others."""
        world, rank = self._mine.mesh.world, self._mine.mesh.rank
        sent = self._sent(name)
        if rank != self._to:
            parts = [self._parameters[name][_cut(box.local)] for by, box in sent if by == rank]
            messages = [Message(part.contiguous(), self._to, sends=True) for part in parts]
            for pending in world.exchange(messages):
                pending.wait()
            return None
        shape, device = self._holdings[self._to][name].whole, self._mine.mesh.device
        whole = torch.empty(shape, dtype=self._kinds[name], device=device)
        messages, places = [], []
        for by, box in sent:
            place = whole[_cut(box.whole)]
            if by == rank:
                place.copy_(self._parameters[name][_cut(box.local)])
            else:
                memory = torch.empty(place.shape, dtype=whole.dtype, device=device)
                messages.append(Message(memory, by, sends=False))
                places.append(place)
        for pending, place in zip(world.exchange(messages), places, strict=True):
            place.copy_(pending.wait())
        return whole

    def _sent(self, name: str) -> list[_Sent]:
        """Return the parts that make up a parameter, each from one rank."""
        layout = self._mine.mesh.layout
        found: dict[tuple[Range, ...], _Sent] = {}
        elements = 0
        for rank, held in self._holdings.items():
            if name not in self._names[coordinate(layout, rank).pp]:
                continue
            for box in held[name].boxes():
                if box.whole not in found:
                    found[box.whole] = _Sent(rank, box)
                    elements += torch.Size(each.size for each in box.whole).numel()
        whole = self._holdings[self._to][name].whole
        if elements != torch.Size(whole).numel():
            raise ValueError(f"the ranks hold {elements} elements of {name}, which has {whole}")
        return list(found.values())

    @cached_property
    def _holdings(self) -> dict[int, dict[str, Holding]]:
        """How the first rank of each place among stages, widths and experts holds the model."""
        layout = self._mine.mesh.layout
        first: dict[tuple[int, ...], int] = {}
        for rank in (self._to, *range(layout.gpus)):
            place, among = coordinate(layout, rank), expert_coordinate(layout, rank)
            first.setdefault((place.pp, place.tp, among.ep, among.expert_tp), rank)
        return {rank: holdings(self._plain, layout, rank) for rank in first.values()}

    @cached_property
    def _names(self) -> list[set[str]]:
        """Which parameters each pipeline rank has."""
        layout, model = self._mine.mesh.layout, self._plain.model
        found = []
        for chunks in rank_chunks(layout, model.layers):
            decoder = build(model)
            if layout.pp > 1:
                keep_layers(decoder, chunks)
            found.append({name for name, _ in decoder.named_parameters()})
        return found


def _cut(ranges: tuple[Range, ...]) -> tuple[slice, ...]:
    return tuple(slice(each.start, each.stop) for each in ranges)
