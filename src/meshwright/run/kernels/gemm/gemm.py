"""The three matrix products of a linear layer, by torch or by cuBLASLt's best-measured algorithm.

    forward    y_NM = x_NK · wᵀ_KM
    dgrad      dx_NK = dy_NM · w_MK
    wgrad      dw_MK = dyᵀ_MN · x_NK

cuBLAS picks an algorithm by a heuristic. On an H200 the best of its first eight proposals is 2–4 %
faster for the shapes of 1B and 8B decoders (2026-11-15: 667 → 696 TFLOP/s for 32768×16384×2048,
652 → 695 for the input gradient of 32768×2048×8192), and a training step is three quarters such
products. `TunedGemm` times the proposals once per shape, on the first operands it sees.
It does not know what the operands mean, nor anything below bfloat16: see `fp8.scaled_mm`.
"""

from typing import Protocol

import torch

from meshwright.run.kernels.gemm.cublaslt import CublasLt, GemmShape, open_cublaslt


class GemmBackend(Protocol):
    """Whoever computes the three products of a linear layer, on contiguous matrices."""

    def forward(self, x_NK: torch.Tensor, w_MK: torch.Tensor) -> torch.Tensor:
        """Return x · wᵀ."""

    def dgrad(self, dy_NM: torch.Tensor, w_MK: torch.Tensor) -> torch.Tensor:
        """Return dy · w."""

    def wgrad(self, dy_NM: torch.Tensor, x_NK: torch.Tensor) -> torch.Tensor:
        """Return dyᵀ · x."""


class TorchGemm:
    """What `torch.mm` computes, on any device and in any format."""

    def forward(self, x_NK: torch.Tensor, w_MK: torch.Tensor) -> torch.Tensor:
        """Return x · wᵀ."""
        return x_NK @ w_MK.t()

    def dgrad(self, dy_NM: torch.Tensor, w_MK: torch.Tensor) -> torch.Tensor:
        """Return dy · w."""
        return dy_NM @ w_MK

    def wgrad(self, dy_NM: torch.Tensor, x_NK: torch.Tensor) -> torch.Tensor:
        """Return dyᵀ · x."""
        return dy_NM.t() @ x_NK


class TunedGemm:
    """The same products by the algorithm of cuBLASLt that was fastest for their shape here.

    Which algorithm wins is a measurement, so two runs may differ in the last bit; a run that must
    repeat itself exactly uses `TorchGemm`.
    """

    def __init__(self, library: CublasLt) -> None:
        self.library = library

    def forward(self, x_NK: torch.Tensor, w_MK: torch.Tensor) -> torch.Tensor:
        """Return x · wᵀ."""
        if not _fits(x_NK, w_MK):
            return TORCH_GEMM.forward(x_NK, w_MK)
        columns, inner = x_NK.shape
        order = GemmShape(len(w_MK), columns, inner, transpose_a=True, transpose_b=False)
        return self._product(order, w_MK, x_NK)

    def dgrad(self, dy_NM: torch.Tensor, w_MK: torch.Tensor) -> torch.Tensor:
        """Return dy · w."""
        if not _fits(dy_NM, w_MK):
            return TORCH_GEMM.dgrad(dy_NM, w_MK)
        columns, inner = dy_NM.shape
        order = GemmShape(w_MK.shape[1], columns, inner, transpose_a=False, transpose_b=False)
        return self._product(order, w_MK, dy_NM)

    def wgrad(self, dy_NM: torch.Tensor, x_NK: torch.Tensor) -> torch.Tensor:
        """Return dyᵀ · x."""
        if not _fits(dy_NM, x_NK):
            return TORCH_GEMM.wgrad(dy_NM, x_NK)
        inner, columns = dy_NM.shape
        order = GemmShape(x_NK.shape[1], columns, inner, transpose_a=False, transpose_b=True)
        return self._product(order, x_NK, dy_NM)

    def _product(self, order: GemmShape, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """Return a product; a column-major matrix is the transpose of a row-major one."""
        out = second.new_empty(order.columns, order.rows)
        self.library.matmul(order, first, second, out)
        return out


TORCH_GEMM = TorchGemm()
"""The products as torch computes them."""


def select_gemm_backend(device: torch.device) -> GemmBackend:
    """Return tuned products where the device and its libraries have them, torch's elsewhere."""
    library = open_cublaslt(device)
    return TORCH_GEMM if library is None else TunedGemm(library)


def view_as_matrix(x: torch.Tensor) -> torch.Tensor:
    """See a tensor as a contiguous matrix of its last axis; copies only what is not contiguous."""
    return x.reshape(-1, x.shape[-1]).contiguous()


def compute_wgrad_in_dtype(
    dy_NM: torch.Tensor, x_NK: torch.Tensor, dtype: torch.dtype, gemm: GemmBackend
) -> torch.Tensor:
    """Return dyᵀ · x in a format at least as wide as theirs, with no rounding in between."""
    if dtype == x_NK.dtype:
        return gemm.wgrad(dy_NM, x_NK)
    if dtype == torch.float32 and x_NK.is_cuda:
        return torch.mm(dy_NM.t(), x_NK, out_dtype=dtype)
    return dy_NM.t().to(dtype) @ x_NK.to(dtype)


def _fits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Say whether both are contiguous bfloat16 matrices, aligned as the fast kernels want them."""
    return all(
        each.dtype == torch.bfloat16
        and each.is_contiguous()
        and each.numel() > 0
        and each.shape[-1] % 8 == 0
        and each.data_ptr() % 256 == 0  # the alignment that cuBLASLt's proposals count on
        for each in (one, other)
    )
