"""`recorded`: a function of autograd's, told to remember nothing where nobody asks for gradients.

`Function.apply` costs the host some 10 µs a call even where no gradient is wanted. A decoder makes
hundreds of such calls in a pass, and on small models these are longer than what the device does.
"""

from typing import Any

import torch


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


def recorded(function: type[torch.autograd.Function], *given: Any) -> Any:
    """Apply a function, recorded for backward where gradients are on."""
    if torch.is_grad_enabled():
        return function.apply(*given)  # type: ignore[no-untyped-call]
    return function.forward(_NOBODY, *given)
