"""`AdaptedLinear`: a linear layer of ours with the adapters of the modules it is made of.

    y = W x + b + U D x                      U, D: B times its scale, and A, of all modules
    y = g ∘ (W x + U D x) + b                DoRA: g = m / ‖W + U D‖, row by row

A fused product (queries, keys and values) stacks modules of theirs; each has an A and a B of its
own. D puts the A one below another, U has the B on its diagonal, with rows in our order: two
products beside the base's, whatever is fused. DoRA's lengths ‖·‖ get no gradient, as in its paper
(§4.3), and are found some rows at a time.

Ranks that share W hold as much of U and D as they need for their part of y (`WeightSharding`).

Shapes: K inputs, M outputs, R ranks of all modules together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.gemm.gemm import GemmBackend
from meshwright.run.nn.linear.linear import Linear, linear
from meshwright.run.nn.recompute import RecomputeOpOrFull
from meshwright.run.nn.sharding.shard_spec import ShardSpec
from meshwright.run.parallel.group_coordinator import GroupCoordinator
from meshwright.run.posttrain.lora.adapter_sharding import ModuleRows, find_local_rows
from meshwright.run.serve.model.lora import PackedModule, compute_row_norms

_CHUNK = 2048
"""Rows of a weight that are in fp32 at once."""
_MASKS_STAY: frozenset[RecomputeOpOrFull] = frozenset({"layernorm", "mlp_act", "core_attn"})
"""Operations whose recomputation runs no linear layer again."""


class _Matrix(nn.Module):
    """A parameter called `weight`, as in PEFT's names."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


class LoRAPair(nn.Module):
    """What an adapter holds of one module of theirs, under PEFT's names."""

    def __init__(
        self, a: Tensor, b: Tensor, magnitude: Tensor | None, *, scale: float, dropout: float
    ) -> None:
        super().__init__()
        self.lora_A, self.lora_B = _Matrix(a), _Matrix(b)
        self.lora_magnitude_vector: nn.Parameter | None = None
        if magnitude is not None:
            self.lora_magnitude_vector = nn.Parameter(magnitude)
        self.scale, self.dropout = scale, dropout

    def apply_dropout(self, x: Tensor, columns: Tensor | None, inputs: int) -> Tensor:
        """Return what A reads of an input, of which other ranks may have other columns."""
        if columns is None:
            return functional.dropout(x, self.dropout, self.training)
        # What one device would leave out of all columns, which is the same on all ranks.
        kept = functional.dropout(x.new_ones(*x.shape[:-1], inputs), self.dropout, self.training)
        return x * kept.index_select(-1, columns.to(x.device))

    @property
    def has_active_dropout(self) -> bool:
        """Whether inputs are left out just now."""
        return self.training and self.dropout > 0


class AdaptedModule(NamedTuple):
    """A module of theirs within a layer of ours, with its adapter."""

    module: PackedModule
    lora: LoRAPair


class WeightSharding(NamedTuple):
    """How a rank holds the weight of a layer that several ranks share."""

    weight: ShardSpec
    group: GroupCoordinator
    """The ranks that have the other rows or columns."""

    @property
    def is_row_parallel(self) -> bool:
        """Whether others have other columns."""
        return self.weight.shape[1] != self.weight.global_shape[1]


class AdaptedLinear:
    """A linear layer with adapters; `Linear.tp_overlap` calls it.

    It is no module, so that the decoder has the parameters it always had.
    """

    def __init__(
        self,
        base_layer: Linear,
        block: nn.Module,
        adapted: Sequence[AdaptedModule],
        among: WeightSharding | None = None,
    ) -> None:
        """`among` says how the layer lies where several ranks share it."""
        self.base_layer, self._block, self._among = base_layer, block, among
        self.lora_pairs = [each.lora for each in adapted]
        held = (
            ShardSpec.unsharded(tuple(base_layer.weight.shape)) if among is None else among.weight
        )
        counts = [len(each.lora.lora_B.weight) for each in adapted]
        self._source = torch.full((len(base_layer.weight),), sum(counts))
        """For each row of ours its row among those of all pairs, and the count of these where an
        adapter leaves it alone."""
        self._rows: list[Tensor] = []
        """Rows of ours that each pair changes."""
        before = 0
        for (part, _), count in zip(adapted, counts, strict=True):
            source, here = map_fused_rows(part, held)
            own = (source < part.num_rows).nonzero().flatten()
            self._source[own] = before + torch.searchsorted(here.row_indices, source[own])
            self._rows.append(own)
            before += count
        self._is_plain = torch.equal(self._source, torch.arange(sum(counts)))
        self._inputs, self._columns = held.global_shape[1], None
        if among is not None and among.is_row_parallel:
            self._columns = among.weight.global_indices("cpu")[1]
        self._kept: Tensor | None = None

    def attach(self) -> None:
        """Let the layer use its adapters."""
        self.base_layer.tp_overlap = self

    def detach(self) -> None:
        """Let the layer compute by its own weight alone."""
        self.base_layer.tp_overlap = None

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, gemm: GemmBackend, /
    ) -> Tensor:
        """Return the base product with what the adapters add."""
        inputs = None
        if self.lora_pairs[0].has_active_dropout:
            self._refuse_replays()
            inputs = [
                pair.apply_dropout(x, self._columns, self._inputs) for pair in self.lora_pairs
            ]
        added = linear(self._narrow(x, inputs), self._up().to(x.dtype))
        if self.lora_pairs[0].lora_magnitude_vector is None:
            return self._base(x, weight, bias, gemm) + added
        grow = self._growth(weight)
        if inputs is None:
            # In fp32: steps of a length near 1 are lost in bf16.
            y = ((self._base(x, weight, None, gemm) + added) * grow).to(x.dtype)
            return y if bias is None else y + bias.to(x.dtype)
        # The base is whole; what DoRA changes of it reads the same inputs as A does.
        more = (grow - 1) * self._dropped_base(inputs, weight) + grow * added
        return self._base(x, weight, bias, gemm) + more.to(x.dtype)

    def _base(self, x: Tensor, weight: Tensor, bias: Tensor | None, gemm: GemmBackend) -> Tensor:
        low = self.base_layer.linear_method
        if low is not None:
            return low(x, weight, bias)
        return linear(x, weight, bias, gemm=gemm)

    def _narrow(self, x: Tensor, inputs: Sequence[Tensor] | None) -> Tensor:
        """Return D x, or what each A makes of inputs of its own."""
        if inputs is None:
            return linear(x, self._down())
        weights = [pair.lora_A.weight for pair in self.lora_pairs]
        return torch.cat([linear(*each) for each in zip(inputs, weights, strict=True)], -1)

    def _down(self) -> Tensor:
        return torch.cat([pair.lora_A.weight for pair in self.lora_pairs])

    def _up(self) -> Tensor:
        """Return U [M, R] in fp32."""
        ranks = [len(pair.lora_A.weight) for pair in self.lora_pairs]
        blocks, before = [], 0
        for pair, rank in zip(self.lora_pairs, ranks, strict=True):
            scaled = pair.lora_B.weight.float() * pair.scale
            blocks.append(functional.pad(scaled, (before, sum(ranks) - before - rank)))
            before += rank
        return self._in_our_rows(blocks, 0.0)

    def _in_our_rows(self, blocks: Sequence[Tensor], otherwise: float) -> Tensor:
        """Put rows of all pairs, one below another, in our order."""
        if self._is_plain:
            return torch.cat([*blocks])
        last = blocks[0].new_full((1, *blocks[0].shape[1:]), otherwise)
        return torch.cat([*blocks, last]).index_select(0, self._source.to(last.device))

    def _growth(self, weight: Tensor) -> Tensor:
        """Return DoRA's factor g of every row, in fp32; rows without an adapter keep theirs."""
        lengths = self._lengths(weight)
        magnitudes = [pair.lora_magnitude_vector for pair in self.lora_pairs]
        found = [each.float() for each in magnitudes if each is not None]
        grown = self._in_our_rows(found, 1.0) / lengths
        if self._is_plain:
            return grown
        adapted = self._source.to(grown.device) < sum(len(each) for each in found)
        return torch.where(adapted, grown, torch.ones_like(grown))

    @torch.no_grad()
    def _lengths(self, weight: Tensor) -> Tensor:
        """Return the lengths of the rows as adapted, over the columns of all ranks."""
        found = compute_row_norms(weight, self._up(), self._down())
        if self._among is None or not self._among.is_row_parallel:
            return found
        return self._among.group.all_reduce(found.square()).sqrt()

    def _dropped_base(self, inputs: Sequence[Tensor], weight: Tensor) -> Tensor:
        """Return W x, each row of it by the inputs that its own adapter reads; others are 0."""
        found = inputs[0].new_zeros(*inputs[0].shape[:-1], len(weight))
        for x, rows in zip(inputs, self._rows, strict=True):
            own = rows.to(weight.device)
            found = found.index_copy(-1, own, linear(x, weight.index_select(0, own)))
        return found

    @torch.no_grad()
    def init_dora_magnitudes(self) -> None:
        """Set DoRA's magnitudes to the lengths that the rows have now."""
        lengths = self._lengths(self.base_layer.weight)
        before = 0
        for pair, rows in zip(self.lora_pairs, self._rows, strict=True):
            assert pair.lora_magnitude_vector is not None
            theirs = (self._source[rows] - before).to(lengths.device)
            pair.lora_magnitude_vector[theirs] = lengths[rows.to(lengths.device)].to(
                pair.lora_magnitude_vector.dtype
            )
            before += len(pair.lora_B.weight)

    def _refuse_replays(self) -> None:
        ops: frozenset[RecomputeOpOrFull] = getattr(self._block, "recompute", frozenset())
        if torch.is_grad_enabled() and ops - _MASKS_STAY:
            what = (
                f"other inputs would be left out when backward runs {min(ops - _MASKS_STAY)} again"
            )
            fix = "use dropout=0, or recompute nothing but norms, activations and attention itself"
            raise InputError([Problem("dropout", what, fix)])

    @torch.no_grad()
    def compute_merged_weight(self) -> Tensor:
        """Return the weight with the adapters in it, in the weight's format."""
        weight = self.base_layer.weight
        up, down = self._up(), self._down().float()
        dora = self.lora_pairs[0].lora_magnitude_vector is not None
        grow = self._growth(weight) if dora else None
        made = torch.empty_like(weight)
        for begin in range(0, len(weight), _CHUNK):
            rows = slice(begin, begin + _CHUNK)
            whole = weight[rows].float().addmm(up[rows], down)
            made[rows] = whole if grow is None else whole * grow[rows, None]
        return made

    @torch.no_grad()
    def merge(self, *, keep: bool) -> None:
        """Put the adapters into the layer's weight; `keep` a copy of what it was."""
        made = self.compute_merged_weight()
        self._kept = self.base_layer.weight.detach().clone() if keep else None
        self.base_layer.weight.copy_(made)
        self.detach()

    @torch.no_grad()
    def unmerge(self) -> None:
        """Put back the weight as it was, bit by bit."""
        assert self._kept is not None
        self.base_layer.weight.copy_(self._kept)
        self._kept = None
        self.attach()


def map_fused_rows(part: PackedModule, weight: ShardSpec) -> tuple[Tensor, ModuleRows]:
    """Return which row of a module's each row of ours is that a rank holds, and which it has.

    The first counts the module's rows for those of ours that are of another.
    """
    found = torch.full((weight.global_shape[0],), part.num_rows)
    # Two columns, so that views see a matrix.
    ours = torch.arange(len(found))[:, None].expand(-1, 2)
    theirs = torch.arange(part.num_rows)[:, None].expand(-1, 2)
    for link in part.links:
        own, their = (
            link.view_parameter(ours).select(-1, 0).reshape(-1),
            link.view_checkpoint(theirs).select(-1, 0).reshape(-1),
        )
        found[own] = their
    found = found[weight.global_indices("cpu")[0]]
    return found, find_local_rows(found, part.num_rows, weight.kv_replica_rows)
