"""The kinds of work that a training step is made of, as predictions and measurements name them."""

from typing import Literal, get_args

KernelKind = Literal[
    "gemm",
    "grouped_gemm",
    "attention",
    "norms",
    "activations",
    "rotary",
    "routing",
    "casts",
    "embedding",
    "head",
    "loss",
    "optimizer",
    "gradient_norm",
]
KERNEL_KINDS: tuple[KernelKind, ...] = get_args(KernelKind)
"""In the order they are shown."""
