"""Rows of `benchmarks.kernels` for what surrounds the layers: loss, fp8, experts, optimizer."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

from benchmarks.kernel_rows import Place, Row, Work, largest_error

if TYPE_CHECKING:
    import torch

VOCABULARY = 128256
"""Of Llama 3."""


def _parameters(place: Place, share: int, dtype: "torch.dtype") -> "tuple[torch.Tensor, ...]":
    """Draw 16 tensors of equal size and one short one, in all 16 / share activation tensors."""
    sizes = [max(64, place.elements // share)] * 16 + [100]
    return tuple(place.draw(size, dtype=dtype) for size in sizes)


def _gradient_norm(kinds: tuple[str, ...]) -> Callable[[Place], Work]:
    def make(place: Place) -> Work:
        import torch

        from meshwright.run.kernels.optimizer.grad_norm import compute_grad_norm
        from meshwright.run.kernels.optimizer.multi_tensor import TensorList

        grads = tuple(
            grad for kind in kinds for grad in _parameters(place, len(kinds), getattr(torch, kind))
        )
        listed = TensorList.from_tensors(grads)
        exact = torch.stack([each.double().square().sum() for each in grads]).sum().sqrt()

        def error() -> float:
            return abs(float(compute_grad_norm(listed, backend=place.backend).norm / exact) - 1)

        return Work(
            sum(each.numel() * each.element_size() for each in grads),
            lambda: compute_grad_norm(listed, backend=place.backend),
            error,
            lambda: torch.nn.utils.get_total_norm(grads, foreach=True),
        )

    return make


def _adamw(
    weights: str, *, master: bool, moments: Literal["fp32", "bf16", "int8"]
) -> Callable[[Place], Work]:
    def make(place: Place) -> Work:
        import torch

        from meshwright.run.kernels.optimizer.fused_update import FusedOptimizerUpdate
        from meshwright.run.kernels.optimizer.global_index import GlobalIndexMap
        from meshwright.run.kernels.optimizer.update_inputs import (
            OptimizerTensors,
            UpdateRule,
            allocate_moment,
            make_step_scalars,
        )

        params = _parameters(place, 2, getattr(torch, weights))
        grads = tuple(place.draw(each.numel()) for each in params)
        rule = UpdateRule("adamw", 0.9, 0.95, 1e-8)
        tensors = OptimizerTensors(
            params=params,
            masters=tuple(each.float() for each in params) if master else (),
            moments=tuple(allocate_moment(params, moments, index) for index in range(2)),
            rounding_keys=tuple(range(len(params))),
            lr_multipliers=(1.0,) * len(params),
            weight_decays=(0.1,) * len(params),
            global_index_maps=(GlobalIndexMap(),) * len(params),
        )
        update = FusedOptimizerUpdate(tensors, rule, backend=place.backend)
        step = torch.ones((), dtype=torch.int64, device=place.device)
        now = make_step_scalars(step, 1e-5, rule)
        # A gradient and a weight (its master where there is one), then the two moments.
        held = 4 if master or weights == "float32" else 2
        moment = {"fp32": 4, "bf16": 2, "int8": 1}[moments]
        each_bytes = 2 + 2 * held + 2 * master + 4 * moment
        scales = 16 / 256 if moments == "int8" else 0
        total = sum(each.numel() for each in params)
        return Work(round((each_bytes + scales) * total), lambda: update(grads, now))

    return make


def _softmax_rows(place: Place) -> Work:
    import torch

    from meshwright.run.kernels.loss.cross_entropy_kernel import (
        CrossEntropyOptions,
        cross_entropy_rows_,
    )

    rows = max(2, place.elements * 4 // VOCABULARY)
    logits = place.draw(rows, VOCABULARY)
    labels = torch.randint(0, VOCABULARY, (rows,), device=place.device)
    nats, lse = (torch.empty(rows, device=place.device) for _ in range(2))
    rule = CrossEntropyOptions(ignore_index=-100, softcap=None, scale=None, z_loss=0.0)
    return Work(
        2 * 2 * logits.numel(),
        lambda: cross_entropy_rows_(logits, labels, nats, lse, rule, gradient=True),
    )


def _scaled(kind: str) -> Callable[[Place], Work]:
    def make(place: Place) -> Work:
        import torch

        from meshwright.run.kernels.loss.scale_tensor import scale_tensor

        dtype = getattr(torch, kind)
        x = place.draw(place.elements * 4, dtype=dtype)
        factor = torch.full((), 1 / 3, device=place.device)

        def error() -> float:
            few = x[:4099]
            got = scale_tensor(few, factor, torch.bfloat16, backend=place.backend)
            return largest_error((got,), (few.double() * factor.double(),))

        return Work(
            (x.element_size() + 2) * x.numel(),
            lambda: scale_tensor(x, factor, torch.bfloat16, backend=place.backend),
            error,
            lambda: torch.mul(x, factor, out=torch.empty_like(x, dtype=torch.bfloat16)),
        )

    return make


def _quantize(
    scaling: Literal["tensor", "row", "1x128", "128x128"], *, transpose: bool
) -> Callable[[Place], Work]:
    def make(place: Place) -> Work:
        from meshwright.run.kernels.fp8 import quantization

        x = place.draw(max(128, place.rows(4096)), 4096)
        call: Callable[[], object]
        if scaling == "tensor":
            call = partial(
                quantization.quantize_tensorwise, x, transpose=transpose, backend=place.backend
            )
        elif scaling == "row":
            call = partial(
                quantization.quantize_rowwise, x, transpose=transpose, backend=place.backend
            )
        else:
            call = partial(
                quantization.quantize_blockwise,
                x,
                scaling,
                transpose=transpose,
                backend=place.backend,
            )
        # One scale for all has to be known before the first number is written, and so has that of
        # a column: a second pass over the input.
        passes = 2 if scaling == "tensor" or (scaling == "row" and transpose) else 1
        return Work((2 * passes + 1 + transpose) * x.numel(), call)

    return make


def _experts(move: Literal["dispatch", "combine"], *, backward: bool) -> Callable[[Place], Work]:
    def make(place: Place) -> Work:
        import torch

        from meshwright.run.kernels.moe.token_permutation import permute, sort_by_expert, unpermute

        width, chosen, experts = 2048, 8, 128  # Qwen3-30B-A3B
        tokens = max(2, place.rows(width) // 4)
        scores = torch.rand(tokens, experts, device=place.device)
        weights, picked = scores.topk(chosen)
        order = sort_by_expert(picked, experts)
        if move == "dispatch":
            x = place.draw(tokens, width).requires_grad_(backward)
            inputs: tuple[torch.Tensor, ...] = (x,)
            forward = partial(permute, x, order, backend=place.backend)
        else:
            y = place.draw(tokens * chosen, width).requires_grad_(backward)
            weights.requires_grad_(backward)
            inputs = y, weights
            forward = partial(unpermute, y, order, weights, backend=place.backend)
        rows = tokens * (1 + chosen * (2 if backward and move == "combine" else 1))
        if not backward:
            return Work(2 * rows * width, forward)
        out = forward()
        grad = place.draw(*out.shape)
        return Work(
            2 * rows * width, lambda: torch.autograd.grad(out, inputs, grad, retain_graph=True)
        )

    return make


TRAINING_ROWS = (
    Row("gradient_norm, bfloat16", _gradient_norm(("bfloat16",))),
    Row("gradient_norm, float32", _gradient_norm(("float32",))),
    Row("gradient_norm, both", _gradient_norm(("bfloat16", "float32"))),
    Row("adamw, float32", _adamw("float32", master=False, moments="fp32")),
    Row("adamw, bfloat16 with masters", _adamw("bfloat16", master=True, moments="fp32")),
    Row("adamw, bfloat16 throughout", _adamw("bfloat16", master=False, moments="bf16")),
    Row("adamw, bfloat16, 8-bit moments", _adamw("bfloat16", master=False, moments="int8")),
    Row("linear_cross_entropy, its softmax", _softmax_rows),
    Row("scaled, bfloat16", _scaled("bfloat16")),
    Row("scaled, float32 to bfloat16", _scaled("float32")),
    Row("quantize_fp8 tensorwise", _quantize("tensor", transpose=False)),
    Row("quantize_fp8 tensorwise, both ways", _quantize("tensor", transpose=True)),
    Row("quantize_fp8 rowwise", _quantize("row", transpose=False)),
    Row("quantize_fp8 rowwise, both ways", _quantize("row", transpose=True)),
    Row("quantize_fp8 1×128, both ways", _quantize("1x128", transpose=True)),
    Row("quantize_fp8 128×128, both ways", _quantize("128x128", transpose=True)),
    Row("dispatch forward", _experts("dispatch", backward=False)),
    Row("dispatch backward", _experts("dispatch", backward=True)),
    Row("combine forward", _experts("combine", backward=False)),
    Row("combine backward", _experts("combine", backward=True)),
)
"""Kernels beside the layers."""
