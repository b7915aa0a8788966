"""Expert parallelism: ranks hold some of the experts each, and tokens travel to them and back.

Every rank routes tokens of its own: the tensor-parallel ranks share out theirs, if sequence
parallelism has not done so. Then (as Megatron-Core's all-to-all dispatcher):

    sort       a token's copies by expert; experts lie in runs along `ep`
    counts     of all ranks that exchange rows; along `ep` sizes follow from them: the host waits
    all-to-all over `ep`
    gather     over `expert_tp`, whose ranks have the same experts and a slice of their width each
    products   on rows regrouped by expert
    and back   reduce-scatter, all-to-all, weighted sum

Without a limit no token is dropped. With the `capacity_factor` of `nn.experts` every expert takes
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
from meshwright.run.kernels.permute import combine, dispatch
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.experts import Experts, Visits
from meshwright.run.nn.holding import even
from meshwright.run.parallel.flow import (
    Travel,
    arrive,
    copy_in,
    gather_in,
    join_parts,
    scatter_out,
    send,
    sum_out,
    take_part,
    trade,
)
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.regroup import Regroup, Slots, indices, regroup, slots
from meshwright.spec.layout import Layout
from meshwright.spec.layout.ranks import expert_coordinate, pipelines_agree
from meshwright.spec.model import Model, feedforward


class Sizes(NamedTuple):
    """How many rows go where; the same for all where every expert takes equally many."""

    sent: list[int] | None
    """Rows to each rank of `ep`."""
    got: list[int] | None
    """Rows from each of them."""
    arrived: int
    """Rows that arrive here."""
    length: int
    """Most that arrive at any rank of `expert_tp`."""
    total: int
    """Rows that arrive at all of these together."""
    counts: Tensor
    """Of rows for the experts held here, by rank of `expert_tp`, rank of `ep`, and expert."""


class Parcel(NamedTuple):
    """Rows on their way to their experts."""

    travel: Travel
    sizes: Sizes
    places: Slots | None
    """Where tokens lie in what is sent, where every expert takes equally many."""


class ExpertExchange:
    """Takes a layer's tokens to the ranks that hold their experts, and brings results back."""

    def __init__(self, mesh: Mesh) -> None:
        layout = mesh.layout
        self.tp, self.ep, self.width = mesh["tp"], mesh["ep"], mesh["expert_tp"]
        self.everyone = mesh["expert_tp-ep"]
        self.shares_tokens = layout.sequence_parallel
        """Ranks have tokens of their own already."""
        self.knows_sizes = self.ep.size == 1 and set(self.width.ranks) <= set(self.tp.ranks)
        """All rows stay with ranks that share the same tokens, so many each."""
        self.overlaps = layout.overlap_ep
        """Shared experts run while rows travel."""
        places = [expert_coordinate(layout, rank) for rank in self.everyone.ranks]
        self.pairs = tuple(place.expert_tp * layout.ep + place.ep for place in places)
        """For each rank that exchanges rows its place among them, by `expert_tp`, then `ep`."""

    def __call__(self, experts: Experts, x_BTD: Tensor) -> Tensor:
        """Return what the routed and shared experts make of tokens."""
        x_ND = x_BTD.flatten(0, -2)
        mine_ND = self._mine(x_ND)
        beside_BTD = None
        if self.everyone.size == 1:
            out_ND = experts.routed(mine_ND)
        else:
            visits = experts.route(mine_ND, experts.room(self._each(len(x_ND))))
            parcel = self._send(experts, visits, experts.narrowed(mine_ND), len(x_ND))
            if self.overlaps:
                beside_BTD = experts.beside(x_BTD)
            out_ND = self._combine(experts, visits, parcel, self._compute(experts, parcel))
            out_ND = experts.widened(out_ND)
        out_BTD = self._joined(out_ND, len(x_ND)).view(x_BTD.shape)
        if beside_BTD is None:
            beside_BTD = experts.beside(x_BTD)
        return out_BTD if beside_BTD is None else out_BTD + beside_BTD

    def _each(self, tokens: int) -> int:
        """Return how many of some tokens a rank takes; the last ones may have less."""
        return tokens if self.shares_tokens else -(-tokens // self.tp.size)

    def _mine(self, x_ND: Tensor) -> Tensor:
        """Return the tokens that this rank routes."""
        if self.shares_tokens or self.tp.size == 1:
            return x_ND
        padded = _filled(x_ND, self._each(len(x_ND)) * self.tp.size)
        held = even(len(x_ND), self.tp.size, self.tp.index)
        return take_part(padded, self.tp, 0)[: held.size]

    def _joined(self, out_ND: Tensor, tokens: int) -> Tensor:
        """Return all of some tokens, of which each rank has those that it routed."""
        if self.shares_tokens or self.tp.size == 1:
            return out_ND
        return join_parts(_filled(out_ND, self._each(tokens)), self.tp, 0)[:tokens]

    def _send(self, experts: Experts, visits: Visits, x_ND: Tensor, tokens: int) -> Parcel:
        """Send the copies of tokens off to their experts."""
        spec = experts.spec
        if visits.room is None:
            sizes = self._sizes(visits.load_X, tokens, spec.top_k)
            rows_RD, places = dispatch(x_ND, visits.order, backend=experts.backend), None
        else:
            sizes = self._equal_sizes(spec.count // self.ep.size, visits.room, x_ND.device)
            places = slots(visits, visits.room)
            rows_RD = places.fill(x_ND)
        return Parcel(send(rows_RD, self.ep, sizes.sent, sizes.got), sizes, places)

    def _compute(self, experts: Experts, parcel: Parcel) -> Tensor:
        """Return what the experts held here make of the rows sent here, and others of theirs."""
        sizes, moves = parcel.sizes, self._regroup(parcel.sizes)
        rows_PD = gather_in(_filled(arrive(parcel.travel), sizes.length), self.width, 0)
        sorted_RD = moves.sort(rows_PD)[: sizes.total]
        made_RD = experts.rows(sorted_RD, moves.ends_X)
        made_PD = moves.restore(_filled(made_RD, len(rows_PD)))
        return scatter_out(made_PD, self.width, 0)[: sizes.arrived]

    def _combine(self, experts: Experts, visits: Visits, parcel: Parcel, made: Tensor) -> Tensor:
        """Bring rows back and add up those of each token."""
        sizes, weights_Nk = parcel.sizes, visits.routes.weights_Nk
        rows_RD = trade(made, self.ep, sizes.got, sizes.sent)
        if parcel.places is not None:
            return parcel.places.combine(rows_RD, weights_Nk)
        return combine(rows_RD, visits.order, weights_Nk, backend=experts.backend)

    def _sizes(self, load_X: Tensor, tokens: int, top_k: int) -> Sizes:
        """Tell all ranks how many rows each has for each expert, and wait for it if need be."""
        ranks, sources = self.width.size, self.ep.size
        by_rank = self.everyone.all_gather(load_X[None])
        placed = torch.empty_like(by_rank)
        placed[indices(self.pairs, load_X.device)] = by_rank
        # Rank of expert_tp, source, rank of ep that holds the experts, expert.
        counts = placed.view(ranks, sources, sources, -1)
        here = self.ep.index
        if self.knows_sizes:
            sums = [[[each * top_k]] for each in self._shares(tokens)]
        elif counts.is_meta:  # a rehearsal has no numbers: all ranks and experts get equally many
            mine = tokens if self.shares_tokens else even(tokens, self.tp.size, self.tp.index).size
            parts = [even(mine * top_k, sources, index).size for index in range(sources)]
            sums = [[parts] * sources] * ranks
        else:
            sums = counts.sum(-1).tolist()
        sent, got = sums[self.width.index][here], [row[here] for row in sums[self.width.index]]
        arrived = [sum(row[here] for row in each) for each in sums]
        to_here = counts[:, :, here].contiguous()
        return Sizes(sent, got, sum(got), max(arrived), sum(arrived), to_here)

    def _shares(self, tokens: int) -> list[int]:
        """Return how many tokens each rank of `expert_tp` routes, if it is among those of `tp`."""
        if self.shares_tokens:
            return [tokens] * self.width.size
        ranks = [self.tp.ranks.index(rank) for rank in self.width.ranks]
        return [even(tokens, self.tp.size, rank).size for rank in ranks]

    def _equal_sizes(self, held: int, most: int, device: torch.device) -> Sizes:
        """Return the sizes where every expert takes so many rows from every rank."""
        ranks, sources = self.width.size, self.ep.size
        counts = torch.full((ranks, sources, held), most, device=device)
        arrived = sources * held * most
        return Sizes(None, None, arrived, arrived, ranks * arrived, counts)

    def _regroup(self, sizes: Sizes) -> Regroup:
        return regroup(sizes.counts, self.pairs, sizes.length)


def share_experts(decoder: Decoder, mesh: Mesh) -> None:
    """Let the routed experts of a decoder work on what `holdings` leaves to this rank."""
    exchange = ExpertExchange(mesh)
    splits = mesh["tp"].size > 1 or exchange.everyone.size > 1

    def total(found: Tensor) -> Tensor:
        # Tensor-parallel ranks differentiate one loss together, context-parallel ones each a part.
        return copy_in(sum_out(sum_out(found, mesh["tp"]), mesh["cp"]), mesh["cp"])

    for experts in decoder.experts():
        experts.adds_bias = mesh["expert_tp"].index == 0
        if splits:
            experts.exchange = exchange
        if mesh["tp-cp"].size > 1:
            experts.sum_shared = total


def sum_loads(decoder: Decoder, mesh: Mesh) -> None:
    """Let every rank know how many tokens of the step each expert got; `update_balance` is next."""
    loads = [experts.load for experts in decoder.experts() if experts.load is not None]
    if not loads:
        return
    total, first = mesh["tp-cp-dp"].all_reduce(torch.cat(loads)), 0
    if mesh.layout.pp > 1 and mesh.layout.schedule == "dualpipe":
        # Two stages hold the same layers, and each has seen other microbatches.
        mesh["mirror"].all_reduce(total)
    for load in loads:
        load.copy_(total[first : first + len(load)])
        first += len(load)


def problems(model: Model, layout: Layout) -> list[Problem]:
    """Return what keeps the experts of a model from being spread by a layout."""
    return list(_problems(model, layout))


def _problems(model: Model, layout: Layout) -> Iterator[Problem]:
    if not pipelines_agree(layout):
        what = f"{layout.order} puts a rank's experts in another stage than its other layers"
        yield Problem("layout.order", what, "name pp last, as in tp-cp-ep-dp-pp")
    for block, _ in model.block_counts():
        spec = block.mlp
        if not isinstance(spec, feedforward.Experts):
            continue
        for name, size, ranks in (
            ("ep", spec.count, layout.ep),
            ("expert_tp", spec.width, layout.experts_tp),
        ):
            if size % ranks:
                noun = "experts" if name == "ep" else "numbers of an expert's width"
                what = f"{ranks} ranks cannot hold {size} {noun} in equal parts"
                yield Problem(f"layout.{name}", what, f"use a divisor of {size}")


def _filled(rows: Tensor, length: int) -> Tensor:
    """Add rows of noughts."""
    if len(rows) == length:
        return rows
    return functional.pad(rows, (0, 0, 0, length - len(rows)))
