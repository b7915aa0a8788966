"""The format in which a parameter's gradient is wanted."""

import torch


def gradient_format(weight: torch.Tensor) -> torch.dtype:
    """Return the format a weight accumulates its gradient in: its own, unless it was told another.

    Only leaves of the graph can be told (`Tensor.grad_dtype`); what saved-tensor hooks hand back in
    backward is not that leaf any more, so this is asked in forward.
    """
    return (weight.grad_dtype if weight.is_leaf else None) or weight.dtype
