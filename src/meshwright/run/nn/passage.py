"""`Passage`: what a tensor goes through on its way into and out of work that ranks share.

A part of a layer (attention, a feed-forward layer) computes with the heads or columns it holds. Who
holds the others, and how results come together, is set from outside as its passage; without one
the part holds everything. Only `run/parallel` makes passages.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from meshwright.run.nn.recompute import dropped


class Passage(Protocol):
    """The way into and out of a part of a layer."""

    gathers: bool
    """Whether what goes in is larger than what came, so that backward better makes it again."""

    def enter(self, x: Tensor) -> Tensor:
        """Return what the part reads."""

    def again(self, x: Tensor) -> Tensor:
        """Return the same once more, without gradients."""

    def leave(self, y: Tensor) -> Tensor:
        """Return the whole result, or this rank's tokens of it, of what each rank has a part of."""


@contextmanager
def entered(passage: Passage | None, x: Tensor) -> Iterator[Tensor]:
    """Give the body what a part reads; the body's backward gathers it again, if it was gathered."""
    if passage is None:
        yield x
        return
    inside = passage.enter(x)
    if not passage.gathers:
        yield inside
        return
    kept = x.detach()
    with dropped((inside, lambda: passage.again(kept))):
        yield inside


def left(passage: Passage | None, y: Tensor) -> Tensor:
    """Return what comes out of a part."""
    return y if passage is None else passage.leave(y)
