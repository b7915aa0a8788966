"""Linear layers whose three products run in fp8.

    forward   y = x · Wᵀ       sums over the width K: x and W as they are
    dgrad     dx = dy · W      sums over the outputs M: dy as it is, W transposed
    wgrad     dw = dyᵀ · x     sums over the tokens N: dy and x transposed

Each of x, dy and W is written in fp8 once, in both directions. For backward a layer keeps the
transposed fp8 x (half of the bf16 x) and refers to the weight's copies, which all microbatches
and recomputations of a step share: they are renewed when the weight has changed.

Two things save memory for one more read of a bf16 tensor each. An x that backward has at hand
anyway, since another operation keeps it or recompute makes it anew, is transposed there; so is a
weight whose copies are not kept (2 bytes per parameter), which is right where a step has one
microbatch. A tensor's one scale is kept from forward; scales of columns and blocks are found then.

Recipes differ in what shares a scale: a tensor, a row (for each product, of the matrix as that
product sums over it), or blocks of 128 (as DeepSeek-V3 trains, arXiv 2412.19437 §3.3).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from meshwright.run.kernels.autograd import get_grad_dtype
from meshwright.run.kernels.fp8.quantization import (
    E4M3,
    E5M2,
    Fp8Matrix,
    Fp8MatrixPair,
    Fp8Scaling,
    quantize_blockwise,
    quantize_rowwise,
    quantize_tensorwise,
    quantize_transposed,
)
from meshwright.run.kernels.fp8.scaled_mm import scaled_mm
from meshwright.run.kernels.gemm.gemm import TORCH_GEMM, compute_wgrad_in_dtype, view_as_matrix
from meshwright.run.kernels.weight_grad_store import compute_or_delay_wgrad, get_delayable_leaf

GemmName = Literal["forward", "dgrad", "wgrad"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Recipe:
    """How a layer is computed in fp8."""

    name: str
    scaling: Literal["tensorwise", "rowwise", "blockwise"]
    gradient_dtype: torch.dtype = E4M3
    """Format of dy; e5m2 has the wider range, e4m3 one bit more."""
    wgrad: Literal["fp8", "bf16"] = "fp8"
    """bf16 computes the weight's gradient from x and dy as they are, and keeps x for it."""
    fast_accum_gemms: frozenset[GemmName] = frozenset({"forward"})
    """Products summed in the tensor cores' 14 bits; others go to float32 every 128 terms."""
    power_of_two: bool = False
    """Scales are powers of two, so that only the cast rounds."""
    keeps_weights: bool = True
    """Keep the weights' copies (2 bytes per parameter) where a step has several microbatches."""

    @property
    def alignment(self) -> int:
        """What every side of an operand is a multiple of."""
        return 128 if self.scaling == "blockwise" else 16


RECIPES: Mapping[str, Fp8Recipe] = {
    recipe.name: recipe
    for recipe in (
        Fp8Recipe(name="fp8-tensorwise", scaling="tensorwise", gradient_dtype=E5M2),
        Fp8Recipe(name="fp8-rowwise", scaling="rowwise"),
        Fp8Recipe(name="fp8-blockwise", scaling="blockwise"),
    )
}
"""The recipes by the names that a layout's precision has for them."""


_LINES: Mapping[str, Fp8Scaling] = {"tensorwise": "tensor", "rowwise": "row", "blockwise": "1x128"}
"""How activations and gradients are scaled."""


class _Kept(NamedTuple):
    """A weight's copies, and what it was when they were made."""

    state: tuple[int, int, torch.dtype]
    copies: Fp8MatrixPair


class Fp8TrainingLinearMethod:
    """Computes one linear layer by a recipe, and keeps its weight's copies."""

    def __init__(self, recipe: Fp8Recipe) -> None:
        self.recipe = recipe
        self._keeps = recipe.keeps_weights
        self._kept: _Kept | None = None

    @property
    def name(self) -> str:
        """The recipe's name."""
        return self.recipe.name

    @property
    def caches_weights(self) -> bool:
        """Whether the weight's copies outlive the product they were made for."""
        return self._keeps

    def set_weight_caching(self, keep: bool) -> None:
        """Keep the weight's copies from now on, if the recipe does, or let go of them."""
        self._keeps = keep and self.recipe.keeps_weights
        if not self._keeps:
            self._kept = None

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        input_is_free: bool = False,
    ) -> torch.Tensor:
        """Return x · weightᵀ + bias."""
        call = _Call(self, torch.is_grad_enabled(), input_is_free)
        y: torch.Tensor = _Product.apply(x, weight, bias, call)  # type: ignore[no-untyped-call]
        return y

    def quantize_weight(self, weight: torch.Tensor, *, transpose: bool) -> Fp8MatrixPair:
        """Return the weight in fp8: what is kept if it is still the same weight, else anew."""
        if weight.is_inference():  # such tensors do not tell when they change
            return self._weight(weight, transpose=transpose)
        state = (weight.data_ptr(), weight._version, weight.dtype)  # noqa: SLF001
        kept = self._kept
        if kept and kept.state == state and (kept.copies.transposed or not transpose):
            return kept.copies
        self._kept = None  # its memory is free for what follows
        copies = self._weight(weight, transpose=transpose)
        if self._keeps:
            self._kept = _Kept(state, copies)
        return copies

    def quantize_activation(self, x_NK: torch.Tensor, *, transpose: bool) -> Fp8MatrixPair:
        """Return a layer's input in fp8."""
        return self._lines(x_NK, E4M3, transpose=transpose)

    def quantize_gradient(self, dy_NM: torch.Tensor, *, transpose: bool) -> Fp8MatrixPair:
        """Return the gradient of a layer's output in fp8."""
        return self._lines(dy_NM, self.recipe.gradient_dtype, transpose=transpose)

    def make_transposed_input(self, saved: torch.Tensor, scale: torch.Tensor | None) -> Fp8Matrix:
        """Return xᵀ from what `select_tensors_to_save` returned: its fp8 copy, or x itself."""
        return self._turned(saved, scale, _LINES[self.recipe.scaling])

    def make_transposed_weight(self, saved: torch.Tensor, scale: torch.Tensor | None) -> Fp8Matrix:
        """Return Wᵀ from what `select_tensors_to_save` returned: its fp8 copy, or W itself."""
        blockwise = self.recipe.scaling == "blockwise"
        return self._turned(saved, scale, "128x128" if blockwise else _LINES[self.recipe.scaling])

    def _turned(
        self, saved: torch.Tensor, scale: torch.Tensor | None, scaling: Fp8Scaling
    ) -> Fp8Matrix:
        if saved.dtype == E4M3:
            assert scale is not None
            return Fp8Matrix(saved, scale, scaling)
        whole = _padded(view_as_matrix(saved), self.recipe.alignment)
        even = self.recipe.power_of_two
        return quantize_transposed(whole, scaling, power_of_two=even, scale=scale)

    def _lines(self, x: torch.Tensor, dtype: torch.dtype, *, transpose: bool) -> Fp8MatrixPair:
        x = _padded(x, self.recipe.alignment)
        even = self.recipe.power_of_two
        if self.recipe.scaling == "tensorwise":
            return quantize_tensorwise(x, dtype=dtype, transpose=transpose, power_of_two=even)
        if self.recipe.scaling == "rowwise":
            return quantize_rowwise(x, dtype=dtype, transpose=transpose, power_of_two=even)
        return quantize_blockwise(x, "1x128", dtype=dtype, transpose=transpose, power_of_two=even)

    def _weight(self, weight: torch.Tensor, *, transpose: bool) -> Fp8MatrixPair:
        if self.recipe.scaling != "blockwise":
            return self._lines(weight, E4M3, transpose=transpose)
        even = self.recipe.power_of_two
        return quantize_blockwise(weight, "128x128", transpose=transpose, power_of_two=even)

    def __getstate__(self) -> dict[str, Any]:
        # Copies of a model make copies of their own.
        return {"recipe": self.recipe, "_keeps": self._keeps, "_kept": None}


class _Call(NamedTuple):
    """What one call of a layer says besides its tensors."""

    layer: Fp8TrainingLinearMethod
    training: bool
    input_is_free: bool


class Fp8WeightGrad:
    """The weight's gradient of one call, from what its backward pass has."""

    def __init__(
        self,
        layer: Fp8TrainingLinearMethod,
        dy: Fp8MatrixPair,
        x: torch.Tensor,
        x_scale: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:
        assert dy.transposed is not None
        self.layer, self.dy_MN, self.dtype = layer, dy.transposed, dtype
        self.x, self.x_scale = x, x_scale

    def __call__(self) -> torch.Tensor:
        """Compute it."""
        x_KN = self.layer.make_transposed_input(self.x, self.x_scale)
        fast = "wgrad" in self.layer.recipe.fast_accum_gemms
        return scaled_mm(self.dy_MN, x_KN, dtype=self.dtype, fast_accum=fast)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        call: _Call,
    ) -> torch.Tensor:
        layer, recipe = call.layer, call.layer.recipe
        needs_dx, needs_dw = (call.training and each for each in ctx.needs_input_grad[:2])
        keeps_copy = needs_dw and recipe.wgrad == "fp8" and not call.input_is_free
        narrow = layer.quantize_activation(view_as_matrix(x), transpose=keeps_copy)
        weights = layer.quantize_weight(weight, transpose=needs_dx and layer.caches_weights)
        y_NM = scaled_mm(
            narrow.direct,
            weights.direct,
            dtype=x.dtype,
            bias=None if bias is None else bias.to(x.dtype),
            fast_accum="forward" in recipe.fast_accum_gemms,
        )
        of_x = select_tensors_to_save(x, narrow) if needs_dw else (None, None)
        of_w = select_tensors_to_save(weight, weights) if needs_dx else (None, None)
        ctx.save_for_backward(*of_x, *of_w)
        ctx.layer, ctx.shape, ctx.leaf = layer, x.shape, get_delayable_leaf(weight)
        of_bias = None if bias is None else get_grad_dtype(bias)
        ctx.dtypes = (x.dtype, get_grad_dtype(weight), of_bias)
        return y_NM[: x.numel() // x.shape[-1]].view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: Fp8TrainingLinearMethod = ctx.layer
        recipe = layer.recipe
        x_dtype, w_dtype, b_dtype = ctx.dtypes
        x, x_scale, w, w_scale = ctx.saved_tensors
        needs_dx, needs_dw, needs_db = ctx.needs_input_grad[:3]
        dy_NM, dx, dw, db = view_as_matrix(dy), None, None, None
        in_fp8 = needs_dw and recipe.wgrad == "fp8"
        if needs_dx or in_fp8:
            narrow = layer.quantize_gradient(dy_NM, transpose=in_fp8)
        if needs_dx:
            w_KM = layer.make_transposed_weight(w, w_scale)
            dx_NK = scaled_mm(
                narrow.direct, w_KM, dtype=x_dtype, fast_accum="dgrad" in recipe.fast_accum_gemms
            )
            dx = dx_NK[: len(dy_NM)].view(ctx.shape)
        if in_fp8:
            dw = compute_or_delay_wgrad(ctx.leaf, Fp8WeightGrad(layer, narrow, x, x_scale, w_dtype))
        elif needs_dw:
            dw = compute_or_delay_wgrad(
                ctx.leaf,
                partial(compute_wgrad_in_dtype, dy_NM, view_as_matrix(x), w_dtype, TORCH_GEMM),
            )
        if needs_db:
            db = dy_NM.sum(0, dtype=torch.float32).to(b_dtype)
        return dx, dw, db, None


def select_tensors_to_save(
    whole: torch.Tensor, copies: Fp8MatrixPair
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return what backward gets: the transposed fp8 copy and its scale, or the tensor itself.

    With that goes the one scale of its copies, where they have one.
    """
    if copies.transposed is not None:
        return copies.transposed.data, copies.transposed.scale
    return whole, copies.direct.scale if copies.direct.scaling == "tensor" else None


def _padded(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Add rows of zeros up to a multiple: the weight's gradient sums over rows, zeros add none."""
    short = -x.shape[0] % multiple if x.shape[0] else multiple
    return torch.nn.functional.pad(x, (0, 0, 0, short)) if short else x
