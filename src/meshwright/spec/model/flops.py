"""FLOPs per token of a `Model`, in our convention and in those other people publish in.

Ours, `exact`: two FLOPs per multiply-add; matrix products and the mixer's core only (no norms,
activations or softmax); causal, windowed and chunked attention counted exactly; the embedding
look-up is free, the output head counts; routed experts count `top_k` times; backward is twice
forward, and recompute is not counted. Vision towers and multi-token heads are not included.
"""

from collections.abc import Callable

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.model.model import Model
from meshwright.spec.model.parameters import count_parameters
from meshwright.spec.model.weights import flops as weight_flops
from meshwright.spec.names import unknown_name


class Flops(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs one token costs."""

    forward: float
    """One forward pass."""
    backward: float
    """One backward pass: gradients of activations and of weights."""

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def count_flops(model: Model, length: int) -> Flops:
    """Count the FLOPs one token costs on average in sequences of `length` tokens, exactly."""
    if length < 1:
        raise InputError([Problem("length", f"{length} is not at least 1", "use 1 or more")])
    forward = float(2 * model.vocab * model.hidden)
    for block, layers in model.block_counts():
        matrices = weight_flops(block.weights(model.hidden))
        forward += layers * (matrices + block.core_flops(length))
    return Flops(forward=forward, backward=2 * forward)


def _square(model: Model, length: int) -> float:
    """Attention of the whole square, forward and backward: 12·layers·heads·head_dim·length."""
    return 3 * sum(layers * block.full_flops(length) for block, layers in model.block_counts())


def _exact(model: Model, length: int) -> float:
    return count_flops(model, length).total


def _six_n(model: Model, length: int) -> float:
    del length
    return 6.0 * count_parameters(model).matmul


def _palm(model: Model, length: int) -> float:
    return _six_n(model, length) + _square(model, length)


def _megatron(model: Model, length: int) -> float:
    return _six_n(model, length) + _square(model, length) / 2


def _sc21(model: Model, length: int) -> float:
    return _palm(model, length) * 4 / 3


CONVENTIONS: dict[str, Callable[[Model, int], float]] = {
    "exact": _exact,
    "6N": _six_n,
    "palm": _palm,
    "megatron": _megatron,
    "sc21": _sc21,
}
"""How people count the FLOPs of one training token, by name:

`exact` as above; `6N` weights only (Kaplan et al. 2020); `palm` 6N plus the full attention square
(PaLM appendix B; torchtitan, llm-foundry, nanotron, Megatron until 2024); `megatron` 6N plus half
the square (Megatron-Core and Megatron-Bridge since); `sc21` is `palm` × 4/3, hardware FLOPs with
full recompute (Narayanan et al. 2021, BLOOM).
"""


def flops_per_token(model: Model, length: int, convention: str = "exact") -> float:
    """Return the FLOPs of training on one token in a named convention."""
    if convention not in CONVENTIONS:
        raise InputError([unknown_name("FLOP convention", convention, CONVENTIONS, "convention")])
    return CONVENTIONS[convention](model, length)
