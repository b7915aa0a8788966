"""FLOPs per token of a `Model`, in our convention and in those other people publish in.

Ours, `exact`: two FLOPs per multiply-add; matrix products and the mixer's core only (no norms,
activations or softmax); causal, windowed and chunked attention counted exactly; the embedding
look-up is free, the output head counts; routed experts count `top_k` times; backward is twice
forward, and recompute is not counted. Multi-token heads count, as they run for every token that
is trained on: each its block, the product that joins two streams, and the output head once more
(Megatron-LM counts them so too). Vision towers are not included.
"""

from collections.abc import Callable

import msgspec

from meshwright.errors import InputError
from meshwright.spec.field_checks import check_integer, raise_problems
from meshwright.spec.model.block import BlockSpec
from meshwright.spec.model.model import Model
from meshwright.spec.model.token_mixers import AttentionSpec, LatentAttentionSpec
from meshwright.spec.model.weights import sum_flops
from meshwright.spec.name_suggestions import build_unknown_name_problem


class ModelFlops(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs one token costs in training."""

    forward: float
    """One forward pass, multi-token heads included."""
    backward: float
    """One backward pass: gradients of activations and of weights."""
    multi_token: float = 0.0
    """What multi-token heads take of `forward`; serving without them costs that much less."""

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


def count_flops(model: Model, length: int) -> ModelFlops:
    """Count the FLOPs one token costs on average in sequences of `length` tokens, exactly.

    The main model and its multi-token heads; `multi_token` tells these apart.
    """
    raise_problems(check_integer("length", length))
    main, heads = _forward(model, lambda block: block.core_flops(length))
    forward = main + heads
    return ModelFlops(forward=forward, backward=2 * forward, multi_token=heads)


def _forward(model: Model, core: Callable[[BlockSpec], float]) -> tuple[float, float]:
    """Count one token's forward FLOPs in the main model and in its multi-token heads.

    `core` says what a block spends between its mixer's matrices: where conventions differ.
    """
    table = 2 * model.vocab * model.hidden
    main = table + sum(
        layers * (sum_flops(block.list_weights(model.hidden)) + core(block))
        for block, layers in model.count_layers_by_block()
    )
    heads = model.multi_token
    if heads is None:
        return main, 0.0
    each = sum_flops(model.list_mtp_weights()) + core(model.block(heads.block)) + table
    return main, heads.depth * each


def _trained(model: Model, core: Callable[[BlockSpec], float]) -> float:
    return 3.0 * sum(_forward(model, core))


def _exact(model: Model, length: int) -> float:
    return count_flops(model, length).total


def _six_n(model: Model, length: int) -> float:
    del length
    return _trained(model, lambda _: 0)


def _palm(model: Model, length: int) -> float:
    return _trained(model, lambda block: block.non_causal_flops(length))


def _megatron(model: Model, length: int) -> float:
    # A recurrence has no square to halve.
    halved = (AttentionSpec, LatentAttentionSpec)
    return _trained(
        model,
        lambda block: (
            block.non_causal_flops(length) / (2 if isinstance(block.mixer, halved) else 1)
        ),
    )


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
the square of softmax attention (Megatron-Core and Megatron-Bridge since); `sc21` is `palm` × 4/3,
hardware FLOPs with full recompute (Narayanan et al. 2021, BLOOM). Recurrences have no square and
count alike in all but `6N`; multi-token heads count in all.
"""


def flops_per_token(model: Model, length: int, convention: str = "exact") -> float:
    """Return the FLOPs of training on one token in a named convention."""
    if convention not in CONVENTIONS:
        raise InputError(
            [build_unknown_name_problem("FLOP convention", convention, CONVENTIONS, "convention")]
        )
    raise_problems(check_integer("length", length))
    return CONVENTIONS[convention](model, length)
