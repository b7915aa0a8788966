"""Products of two fp8 operands, by cuBLAS on a GPU and by the numbers they stand for elsewhere.

Scales are detected nowhere: an operand says how it is scaled, and torch is told. What runs where:
tensorwise and rowwise scales need compute capability 8.9 or more, blocks of 128 a Hopper (9.0).
"""

import torch
from torch.nn.functional import ScalingType
from torch.nn.functional import scaled_mm as torch_scaled_mm

from meshwright.errors import InputError, Problem
from meshwright.run.kernels.fp8.quantization import Fp8Matrix, Fp8Scaling, dequantize

_KINDS = {
    "tensor": ScalingType.TensorWise,
    "row": ScalingType.RowWise,
    "1x128": ScalingType.BlockWise1x128,
    "128x128": ScalingType.BlockWise128x128,
}
_PAIRS: frozenset[tuple[Fp8Scaling, Fp8Scaling]] = frozenset(
    {
        ("tensor", "tensor"),
        ("row", "row"),
        ("1x128", "1x128"),
        ("1x128", "128x128"),
        ("128x128", "1x128"),
    }
)
"""How both operands may be scaled: what cuBLAS 12.9 and later knows on a Hopper."""


def scaled_mm(
    a: Fp8Matrix,
    b: Fp8Matrix,
    *,
    dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    fast_accum: bool = False,
) -> torch.Tensor:
    """Return a · bᵀ + bias.

    `fast_accum` sums in the tensor cores' own registers, which keep about 14 bits, rather than
    adding to float32 sums every 128 terms (DeepSeek-V3, arXiv 2412.19437 §3.3.2).
    """
    _check(a, b)
    if not a.data.is_cuda:
        product = dequantize(a) @ dequantize(b).t()
        return (product if bias is None else product + bias.float()).to(dtype)
    blocks = a.scaling in {"1x128", "128x128"}
    product = torch_scaled_mm(
        a.data,
        b.data.t(),
        a.scale,
        _KINDS[a.scaling],
        b.scale.t() if b.scaling == "row" else b.scale,
        _KINDS[b.scaling],
        bias=None if blocks else bias,
        output_dtype=dtype,
        use_fast_accum=fast_accum and not blocks,
    )
    return product.add_(bias) if blocks and bias is not None else product


def _check(a: Fp8Matrix, b: Fp8Matrix) -> None:
    problems = []
    if (a.scaling, b.scaling) not in _PAIRS:
        what = f"operands scaled by {a.scaling} and {b.scaling} cannot be multiplied"
        known = ", ".join(f"{one} with {other}" for one, other in sorted(_PAIRS))
        problems.append(Problem("multiply_fp8", what, f"use {known}"))
    if a.data.shape[1] != b.data.shape[1]:
        what = f"operands of width {a.data.shape[1]} and {b.data.shape[1]} do not fit"
        problems.append(Problem("multiply_fp8", what, "both are summed over their last axis"))
    if problems:
        raise InputError(problems)
