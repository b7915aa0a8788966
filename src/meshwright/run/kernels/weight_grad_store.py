"""Gradients of weights that can wait, so that the layer before gets its gradient sooner.

    with delay_wgrad_compute() as late:
        output.backward(gradient)      inputs' gradients, and those of small parameters
    late.finish()                      the weights' own, in the order they were put aside

This splits a backward pass in the parts I and W of zero-bubble schedules (Qi et al. 2024, arXiv
2401.10241). Sums and formats are those of one pass: a weight's gradient goes through autograd's own
accumulation, whose hooks see it. What a product needs is held from one part to the other.

One switch serves the whole process, since autograd runs backward on threads of its own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

WeightGradFn = Callable[[], Tensor]


class WeightGradStore:
    """Weights whose gradients are still to be computed."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Tensor, WeightGradFn]] = []

    def put(self, weight: Tensor, compute: WeightGradFn) -> None:
        """Put a gradient aside."""
        self._waiting.append((weight, compute))

    def __len__(self) -> int:
        """Return how many wait."""
        return len(self._waiting)

    def compute_all(self) -> None:
        """Compute what waits and add it to the weights' gradients."""
        waiting, self._waiting = self._waiting[::-1], []
        while waiting:  # what a product has read is free after it
            weight, compute = waiting.pop()
            weight.backward(compute())  # type: ignore[no-untyped-call]


_late: WeightGradStore | None = None


@contextmanager
def delay_wgrad_compute() -> Iterator[WeightGradStore]:
    """Put aside the weights' gradients of backward passes inside."""
    global _late  # noqa: PLW0603 - see above: autograd's threads have to see it
    before, _late = _late, WeightGradStore()
    try:
        yield _late
    finally:
        _late = before


def compute_or_delay_wgrad(leaf: Tensor | None, compute: WeightGradFn) -> Tensor | None:
    """Return a weight's gradient for autograd, or None where it is put aside.

    `leaf` is the parameter as forward got it; None where it is no leaf and cannot wait.
    """
    if _late is None or leaf is None:
        return compute()
    _late.put(leaf, compute)
    return None


def get_delayable_leaf(weight: Tensor) -> Tensor | None:
    """Return a weight if its gradient can wait: if it ends there and nothing is done with it."""
    return weight if weight.is_leaf else None
