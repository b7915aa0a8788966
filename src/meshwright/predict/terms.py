"""The kinds of work that a training step is made of, as predictions and measurements name them."""

from typing import Literal, get_args

Term = Literal[
    "products",
    "grouped products",
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
    "gradient norm",
]
TERMS: tuple[Term, ...] = get_args(Term)
"""In the order they are shown."""
