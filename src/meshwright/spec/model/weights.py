"""`Weight`: one matrix of a model. Counts, FLOPs, memory and shapes all come from these lists."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

TensorParallelSplit = Literal["column", "row", "none"]
WeightRole = Literal["mixer", "mlp", "shared", "router", "expert"]


class Weight(NamedTuple):
    """A matrix that multiplies activations, or `copies` of it of which a token uses `active`."""

    name: str
    fan_in: int
    fan_out: int
    split: TensorParallelSplit = "column"
    """Which side tensor parallelism cuts: the outputs, the inputs, or nothing (replicated)."""
    bias: bool = False
    copies: int = 1
    active: int = 1
    max_shards: int | None = None
    """Tensor-parallel ranks beyond this many hold duplicates (key and value heads run out)."""
    part: WeightRole = "mlp"
    """What it belongs to: the mixer, a dense MLP, what every token uses beside routed experts
    (`shared`), the router, or the routed experts, which expert parallelism spreads."""

    @property
    def entries_per_copy(self) -> int:
        """Entries of one copy, without its bias."""
        return self.fan_in * self.fan_out

    @property
    def parameters(self) -> int:
        """Parameters of all copies with their biases."""
        return self.copies * (self.entries_per_copy + (self.fan_out if self.bias else 0))

    @property
    def flops(self) -> int:
        """FLOPs one token spends here in a forward pass; a multiply-add counts as two."""
        return 2 * self.active * self.entries_per_copy

    def count_shards(self, tp: int) -> int:
        """Return into how many parts a tensor-parallel group of `tp` cuts one copy."""
        if self.split == "none":
            return 1
        return min(tp, self.max_shards or tp)

    def count_rank_parameters(self, tp: int, ep: int = 1) -> int:
        """Return the parameters one rank holds under tensor and expert parallelism."""
        shards = self.count_shards(tp)
        bias = 0
        if self.bias:
            bias = self.fan_out // shards if self.split == "column" else self.fan_out
        copies = self.copies // ep if self.part == "expert" else self.copies
        return copies * (self.entries_per_copy // shards + bias)


def sum_parameters(weights: Iterable[Weight]) -> int:
    """Sum the parameters of some weights."""
    return sum(weight.parameters for weight in weights)


def sum_active_parameters(weights: Iterable[Weight]) -> int:
    """Sum the parameters a single token touches, biases included."""
    return sum(weight.parameters // weight.copies * weight.active for weight in weights)


def sum_flops(weights: Iterable[Weight]) -> int:
    """Sum the forward FLOPs one token spends in some weights."""
    return sum(weight.flops for weight in weights)
