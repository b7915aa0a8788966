"""`ParameterGatherer`: gathers parameters of a sharded model on one rank, one at a time.

    plain = build_decoder(model, …)                                        # on every rank
    save_hf_checkpoint(plain, folder, whole=ParameterGatherer(mine, plain))

Who holds which part follows from the layout alone, so each rank knows what to send and the one that
gets it what to expect. A part that several ranks hold is sent by the first of them.
"""

from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import build_decoder
from meshwright.run.nn.sharding.shard_spec import IndexRange, ShardBox, ShardSpec
from meshwright.run.parallel.group_coordinator import P2PMessage
from meshwright.run.parallel.pipeline_parallel.pipeline_stage import drop_other_stages
from meshwright.run.parallel.shard_specs import make_shard_specs
from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.spec.layout.pipeline_chunks import list_chunks_by_rank
from meshwright.spec.layout.ranks import get_coordinate, get_expert_coordinate


class _Sent(NamedTuple):
    """A part of a parameter and the rank that sends it."""

    rank: int
    box: ShardBox


class ParameterGatherer:
    """Gathers parameters by name; all ranks ask for the same ones in the same order."""

    def __init__(self, mine: ShardedModel, plain: Decoder, to: int = 0) -> None:
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
            parts = [
                self._parameters[name][_cut(box.local_ranges)] for by, box in sent if by == rank
            ]
            messages = [P2PMessage(part.contiguous(), self._to, is_send=True) for part in parts]
            for pending in world.batch_send_recv(messages):
                pending.wait()
            return None
        shape, device = self._shard_specs[self._to][name].global_shape, self._mine.mesh.device
        whole = torch.empty(shape, dtype=self._kinds[name], device=device)
        messages, places = [], []
        for by, box in sent:
            place = whole[_cut(box.global_ranges)]
            if by == rank:
                place.copy_(self._parameters[name][_cut(box.local_ranges)])
            else:
                memory = torch.empty(place.shape, dtype=whole.dtype, device=device)
                messages.append(P2PMessage(memory, by, is_send=False))
                places.append(place)
        for pending, place in zip(world.batch_send_recv(messages), places, strict=True):
            place.copy_(pending.wait())
        return whole

    def _sent(self, name: str) -> list[_Sent]:
        """Return the parts that make up a parameter, each from one rank."""
        layout = self._mine.mesh.layout
        found: dict[tuple[IndexRange, ...], _Sent] = {}
        elements = 0
        for rank, held in self._shard_specs.items():
            if name not in self._names[get_coordinate(layout, rank).pp]:
                continue
            for box in held[name].list_boxes():
                if box.global_ranges not in found:
                    found[box.global_ranges] = _Sent(rank, box)
                    elements += torch.Size(each.size for each in box.global_ranges).numel()
        whole = self._shard_specs[self._to][name].global_shape
        if elements != torch.Size(whole).numel():
            raise ValueError(f"the ranks hold {elements} elements of {name}, which has {whole}")
        return list(found.values())

    @cached_property
    def _shard_specs(self) -> dict[int, dict[str, ShardSpec]]:
        """How the first rank of each place among stages, widths and experts holds the model."""
        layout = self._mine.mesh.layout
        first: dict[tuple[int, ...], int] = {}
        for rank in (self._to, *range(layout.gpus)):
            place, among = get_coordinate(layout, rank), get_expert_coordinate(layout, rank)
            first.setdefault((place.pp, place.tp, among.ep, among.expert_tp), rank)
        return {rank: make_shard_specs(self._plain, layout, rank) for rank in first.values()}

    @cached_property
    def _names(self) -> list[set[str]]:
        """Which parameters each pipeline rank has."""
        layout, model = self._mine.mesh.layout, self._plain.model
        found = []
        for chunks in list_chunks_by_rank(layout, model.layers):
            decoder = build_decoder(model)
            if layout.pp > 1:
                drop_other_stages(decoder, chunks)
            found.append({name for name, _ in decoder.named_parameters()})
        return found


def _cut(ranges: tuple[IndexRange, ...]) -> tuple[slice, ...]:
    return tuple(slice(each.start, each.stop) for each in ranges)
