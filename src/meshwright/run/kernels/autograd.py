"""The format in which a parameter's gradient is wanted."""

from typing import Any

import torch


def get_grad_dtype(weight: torch.Tensor) -> torch.dtype:
    """Return the format a weight accumulates its gradient in: its own, unless it was told another.

    Only leaves of the graph can be told (`Tensor.grad_dtype`); what saved-tensor hooks hand
    back in backward is not that leaf any more, so this is asked in forward.
    """
    return (weight.grad_dtype if weight.is_leaf else None) or weight.dtype


class _Nobody:
    """The context of a pass that has no backward: takes everything, keeps nothing."""

    __slots__ = ()

    def __setattr__(self, name: str, value: object) -> None:
        """Keep nothing."""

    def save_for_backward(self, *tensors: object) -> None:
        """Save nothing."""

    def set_materialize_grads(self, value: bool) -> None:
        """Have no gradients."""


_NOBODY = _Nobody()


def apply_autograd(function: type[torch.autograd.Function], *given: Any) -> Any:
    """Apply a function, recorded for backward where gradients are on."""
    if torch.is_grad_enabled():
        return function.apply(*given)  # type: ignore[no-untyped-call]
    return function.forward(_NOBODY, *given)
