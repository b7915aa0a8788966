"""`ParallelHooks`: what a tensor goes through on its way into and out of work that ranks share.

A part of a layer (attention, a feed-forward layer) computes with the heads or columns it holds. Who
holds the others, and how results come together, is set from outside as its passage; without one
the part holds everything. Only `run/parallel` makes passages.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from meshwright.run.nn.recompute import drop_saved_tensors


class ParallelHooks(Protocol):
    """The way into and out of a part of a layer."""

    gathers_input: bool
    """Whether what goes in is larger than what came, so that backward better makes it again."""

    def gather_input(self, x: Tensor) -> Tensor:
        """Return what the part reads."""

    def regather_input(self, x: Tensor) -> Tensor:
        """Return the same once more, without gradients."""

    def reduce_output(self, y: Tensor) -> Tensor:
        """Return the whole result, or this rank's tokens of it, of what each rank has a part of."""


@contextmanager
def apply_input_hook(passage: ParallelHooks | None, x: Tensor) -> Iterator[Tensor]:
    """Give the body what a part reads; the body's backward gathers it again, if it was gathered."""
    if passage is None:
        yield x
        return
    inside = passage.gather_input(x)
    if not passage.gathers_input:
        yield inside
        return
    kept = x.detach()
    with drop_saved_tensors((inside, lambda: passage.regather_input(kept))):
        yield inside


def apply_output_hook(passage: ParallelHooks | None, y: Tensor) -> Tensor:
    """Return what comes out of a part."""
    return y if passage is None else passage.reduce_output(y)
