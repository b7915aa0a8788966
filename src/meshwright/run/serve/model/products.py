"""`RepeatedProducts`: matrix products of a served model, tuned for the sizes that come again.

Steps that decode have one of a few dozen sizes, the captured ones, and a step that is full of
prompts has as many tokens as may be in one: for those the fastest of cuBLASLt's algorithms is
measured once, as the engine starts. Steps between them have any size, of which none is worth it.
"""

from collections.abc import Iterable

from torch import Tensor

from meshwright.run.kernels.products import TORCH, Products


class RepeatedProducts:
    """Tuned products for some numbers of rows, torch's for all others."""

    def __init__(self, tuned: Products, rows: Iterable[int]) -> None:
        self.tuned, self.rows = tuned, frozenset(rows)

    def forward(self, x_NK: Tensor, w_MK: Tensor) -> Tensor:
        """Return x · wᵀ."""
        return (self.tuned if len(x_NK) in self.rows else TORCH).forward(x_NK, w_MK)

    def input_gradient(self, dy_NM: Tensor, w_MK: Tensor) -> Tensor:
        """Return dy · w."""
        return TORCH.input_gradient(dy_NM, w_MK)

    def weight_gradient(self, dy_NM: Tensor, x_NK: Tensor) -> Tensor:
        """Return dyᵀ · x."""
        return TORCH.weight_gradient(dy_NM, x_NK)
