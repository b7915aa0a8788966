"""Expert parallelism: ranks hold some of the experts each, and tokens travel to them and back.

Every rank routes tokens of its own: the tensor-parallel ranks share out theirs, if sequence
parallelism has not done so. Then (as Megatron-Core's all-to-all dispatcher):

    sort       a token's copies by expert; experts lie in runs along `ep`
    counts     of all ranks that exchange rows; along `ep` sizes follow from them: the host waits
    all-to-all over `ep`
    gather     over `expert_tp`, whose ranks have the same experts and a slice of their width each
    products   on rows regrouped by expert
    and back   reduce-scatter, all-to-all, weighted sum

Without a limit no token is dropped. With the `capacity_factor` of `nn.moe` every expert takes
the same number of tokens from every rank, so sizes are known before and the host waits for nothing;
in evaluation nothing is dropped.

Letters: B sequences, T positions, N tokens of this rank, k experts per token, X experts, D width,
R rows sorted by expert.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from meshwright.errors import Problem
from meshwright.run.kernels.moe.token_permutation import permute, unpermute
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.moe.moe_layer import MoELayer, TokenRouting
from meshwright.run.nn.sharding.shard_spec import split_evenly
from meshwright.run.parallel.autograd_collectives import (
    AsyncAllToAll,
    all_to_all,
    copy_to_region,
    finish_all_to_all,
    gather_from_region,
    gather_from_sequence_region,
    reduce_from_region,
    reduce_scatter_to_sequence_region,
    scatter_to_region,
    start_all_to_all,
)
from meshwright.run.parallel.expert_parallel.row_permutation import (
    CapacitySlots,
    RowPermutation,
    assign_capacity_slots,
    get_cached_indices,
    make_row_permutation,
)
from meshwright.run.parallel.mesh import Mesh
from meshwright.spec.layout import Layout
from meshwright.spec.layout.ranks import get_expert_coordinate, has_matching_expert_stages
from meshwright.spec.model import Model, feedforward


class AllToAllSplits(NamedTuple):
    """How many rows go where; the same for all where every expert takes equally many."""

    input_splits: list[int] | None
    """Rows to each rank of `ep`."""
    output_splits: list[int] | None
    """Rows from each of them."""
    received_rows: int
    """Rows that arrive here."""
    max_received_rows: int
    """Most that arrive at any rank of `expert_tp`."""
    total_received_rows: int
    """Rows that arrive at all of these together."""
    rows_by_expert: Tensor
    """Of rows for the experts held here, by rank of `expert_tp`, rank of `ep`, and expert."""


class DispatchedTokens(NamedTuple):
    """Rows on their way to their experts."""

    async_all_to_all: AsyncAllToAll
    splits: AllToAllSplits
    capacity_slots: CapacitySlots | None
    """Where tokens lie in what is sent, where every expert takes equally many."""


class AllToAllTokenDispatcher:
    """Takes a layer's tokens to the ranks that hold their experts, and brings results back."""

    def __init__(self, mesh: Mesh) -> None:
        layout = mesh.layout
        self.tp, self.ep, self.expert_tp = mesh["tp"], mesh["ep"], mesh["expert_tp"]
        self.dispatch_group = mesh["expert_tp-ep"]
        self.sequence_parallel = layout.sequence_parallel
        """Ranks have tokens of their own already."""
        self.has_static_splits = self.ep.size == 1 and set(self.expert_tp.ranks) <= set(
            self.tp.ranks
        )
        """All rows stay with ranks that share the same tokens, so many each."""
        self.overlap_shared_experts = layout.overlap_ep
        """Shared experts run while rows travel."""
        places = [get_expert_coordinate(layout, rank) for rank in self.dispatch_group.ranks]
        self.dispatch_positions = tuple(place.expert_tp * layout.ep + place.ep for place in places)
        """For each rank that exchanges rows its place among them, by `expert_tp`, then `ep`."""

    def __call__(self, experts: MoELayer, x_BTD: Tensor) -> Tensor:
        """Return what the routed and shared experts make of tokens."""
        x_ND = x_BTD.flatten(0, -2)
        mine_ND = self._mine(x_ND)
        beside_BTD = None
        if self.dispatch_group.size == 1:
            out_ND = experts.forward_routed_experts(mine_ND)
        else:
            visits = experts.route(mine_ND, experts.get_capacity(self._each(len(x_ND))))
            parcel = self._send(experts, visits, experts.project_to_latent(mine_ND), len(x_ND))
            if self.overlap_shared_experts:
                beside_BTD = experts.forward_shared_experts(x_BTD)
            out_ND = self._combine(experts, visits, parcel, self._compute(experts, parcel))
            out_ND = experts.project_from_latent(out_ND)
        out_BTD = self._joined(out_ND, len(x_ND)).view(x_BTD.shape)
        if beside_BTD is None:
            beside_BTD = experts.forward_shared_experts(x_BTD)
        return out_BTD if beside_BTD is None else out_BTD + beside_BTD

    def _each(self, tokens: int) -> int:
        """Return how many of some tokens a rank takes; the last ones may have less."""
        return tokens if self.sequence_parallel else -(-tokens // self.tp.size)

    def _mine(self, x_ND: Tensor) -> Tensor:
        """Return the tokens that this rank routes."""
        if self.sequence_parallel or self.tp.size == 1:
            return x_ND
        padded = _filled(x_ND, self._each(len(x_ND)) * self.tp.size)
        held = split_evenly(len(x_ND), self.tp.size, self.tp.index)
        return scatter_to_region(padded, self.tp, 0)[: held.size]

    def _joined(self, out_ND: Tensor, tokens: int) -> Tensor:
        """Return all of some tokens, of which each rank has those that it routed."""
        if self.sequence_parallel or self.tp.size == 1:
            return out_ND
        return gather_from_region(_filled(out_ND, self._each(tokens)), self.tp, 0)[:tokens]

    def _send(
        self, experts: MoELayer, visits: TokenRouting, x_ND: Tensor, tokens: int
    ) -> DispatchedTokens:
        """Send the copies of tokens off to their experts."""
        spec = experts.spec
        if visits.capacity is None:
            sizes = self._sizes(visits.tokens_per_expert_X, tokens, spec.top_k)
            rows_RD, places = permute(x_ND, visits.permutation, backend=experts.backend), None
        else:
            sizes = self._equal_sizes(spec.count // self.ep.size, visits.capacity, x_ND.device)
            places = assign_capacity_slots(visits, visits.capacity)
            rows_RD = places.gather_tokens(x_ND)
        return DispatchedTokens(
            start_all_to_all(rows_RD, self.ep, sizes.input_splits, sizes.output_splits),
            sizes,
            places,
        )

    def _compute(self, experts: MoELayer, parcel: DispatchedTokens) -> Tensor:
        """Return what the experts held here make of the rows sent here, and others of theirs."""
        sizes, moves = parcel.splits, self._regroup(parcel.splits)
        rows_PD = gather_from_sequence_region(
            _filled(finish_all_to_all(parcel.async_all_to_all), sizes.max_received_rows),
            self.expert_tp,
            0,
        )
        sorted_RD = moves.sort(rows_PD)[: sizes.total_received_rows]
        made_RD = experts.forward_local_experts(sorted_RD, moves.ends_X)
        made_PD = moves.restore(_filled(made_RD, len(rows_PD)))
        return reduce_scatter_to_sequence_region(made_PD, self.expert_tp, 0)[: sizes.received_rows]

    def _combine(
        self, experts: MoELayer, visits: TokenRouting, parcel: DispatchedTokens, made: Tensor
    ) -> Tensor:
        """Bring rows back and add up those of each token."""
        sizes, weights_Nk = parcel.splits, visits.routes.weights_Nk
        rows_RD = all_to_all(made, self.ep, sizes.output_splits, sizes.input_splits)
        if parcel.capacity_slots is not None:
            return parcel.capacity_slots.combine_outputs(rows_RD, weights_Nk)
        return unpermute(rows_RD, visits.permutation, weights_Nk, backend=experts.backend)

    def _sizes(self, load_X: Tensor, tokens: int, top_k: int) -> AllToAllSplits:
        """Tell all ranks how many rows each has for each expert, and wait for it if need be."""
        ranks, sources = self.expert_tp.size, self.ep.size
        by_rank = self.dispatch_group.all_gather(load_X[None])
        placed = torch.empty_like(by_rank)
        placed[get_cached_indices(self.dispatch_positions, load_X.device)] = by_rank
        # Rank of expert_tp, source, rank of ep that holds the experts, expert.
        counts = placed.view(ranks, sources, sources, -1)
        here = self.ep.index
        if self.has_static_splits:
            sums = [[[each * top_k]] for each in self._shares(tokens)]
        elif counts.is_meta:  # a rehearsal has no numbers: all ranks and experts get equally many
            mine = (
                tokens
                if self.sequence_parallel
                else split_evenly(tokens, self.tp.size, self.tp.index).size
            )
            parts = [split_evenly(mine * top_k, sources, index).size for index in range(sources)]
            sums = [[parts] * sources] * ranks
        else:
            sums = counts.sum(-1).tolist()
        sent, got = (
            sums[self.expert_tp.index][here],
            [row[here] for row in sums[self.expert_tp.index]],
        )
        arrived = [sum(row[here] for row in each) for each in sums]
        to_here = counts[:, :, here].contiguous()
        return AllToAllSplits(sent, got, sum(got), max(arrived), sum(arrived), to_here)

    def _shares(self, tokens: int) -> list[int]:
        """Return how many tokens each rank of `expert_tp` routes, if it is among those of `tp`."""
        if self.sequence_parallel:
            return [tokens] * self.expert_tp.size
        ranks = [self.tp.ranks.index(rank) for rank in self.expert_tp.ranks]
        return [split_evenly(tokens, self.tp.size, rank).size for rank in ranks]

    def _equal_sizes(self, held: int, most: int, device: torch.device) -> AllToAllSplits:
        """Return the sizes where every expert takes so many rows from every rank."""
        ranks, sources = self.expert_tp.size, self.ep.size
        counts = torch.full((ranks, sources, held), most, device=device)
        arrived = sources * held * most
        return AllToAllSplits(None, None, arrived, arrived, ranks * arrived, counts)

    def _regroup(self, sizes: AllToAllSplits) -> RowPermutation:
        return make_row_permutation(
            sizes.rows_by_expert, self.dispatch_positions, sizes.max_received_rows
        )


def apply_expert_parallel(decoder: Decoder, mesh: Mesh) -> None:
    """Let the routed experts of a decoder work on what `shard_specs` leaves to this rank."""
    exchange = AllToAllTokenDispatcher(mesh)
    splits = mesh["tp"].size > 1 or exchange.dispatch_group.size > 1

    def total(found: Tensor) -> Tensor:
        # Tensor-parallel ranks differentiate one loss together, context-parallel ones each a part.
        return copy_to_region(
            reduce_from_region(reduce_from_region(found, mesh["tp"]), mesh["cp"]), mesh["cp"]
        )

    for experts in decoder.iter_moe_layers():
        experts.adds_bias = mesh["expert_tp"].index == 0
        if splits:
            experts.token_dispatcher = exchange
        if mesh["tp-cp"].size > 1:
            experts.all_reduce_sum = total


def all_reduce_expert_load(decoder: Decoder, mesh: Mesh) -> None:
    """All-reduce how many tokens of the step each expert got, for `update_expert_bias`."""
    loads = [
        experts.tokens_per_expert
        for experts in decoder.iter_moe_layers()
        if experts.tokens_per_expert is not None
    ]
    if not loads:
        return
    total, first = mesh["tp-cp-dp"].all_reduce(torch.cat(loads)), 0
    if mesh.layout.pp > 1 and mesh.layout.schedule == "dualpipe":
        # Two stages hold the same layers, and each has seen other microbatches.
        mesh["mirror"].all_reduce(total)
    for load in loads:
        load.copy_(total[first : first + len(load)])
        first += len(load)


def find_expert_parallel_problems(model: Model, layout: Layout) -> list[Problem]:
    """Return what keeps the experts of a model from being spread by a layout."""
    return list(_problems(model, layout))


def _problems(model: Model, layout: Layout) -> Iterator[Problem]:
    if not has_matching_expert_stages(layout):
        what = f"{layout.order} puts a rank's experts in another stage than its other layers"
        yield Problem("layout.order", what, "name pp last, as in tp-cp-ep-dp-pp")
    for block, _ in model.count_layers_by_block():
        spec = block.mlp
        if not isinstance(spec, feedforward.MoESpec):
            continue
        for name, size, ranks in (
            ("ep", spec.count, layout.ep),
            ("expert_tp", spec.width, layout.effective_expert_tp),
        ):
            if size % ranks:
                noun = "experts" if name == "ep" else "columns of an expert's width"
                what = f"{ranks} ranks cannot hold {size} {noun} in equal parts"
                yield Problem(f"layout.{name}", what, f"use a divisor of {size}")


def _filled(rows: Tensor, length: int) -> Tensor:
    """Add rows of noughts."""
    if len(rows) == length:
        return rows
    return functional.pad(rows, (0, 0, 0, length - len(rows)))
