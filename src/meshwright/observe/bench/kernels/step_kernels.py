"""Kernels around a model's layers that memory bounds: loss, casts, optimizer, norm of gradients."""

from typing import TYPE_CHECKING

from meshwright.observe.bench.bench_case import BenchCase
from meshwright.observe.bench.kernels.bench_kernel import BenchKernel, Sizes, TensorFactory
from meshwright.observe.bench.kernels.layer_kernels import list_sizes_by_tokens, make_backward_call
from meshwright.observe.bench.timing import Call
from meshwright.predict.cost.curves import MemoryOp
from meshwright.predict.cost.memory_bound import bytes_moved
from meshwright.spec.layout.model_states import BYTES_PER_ELEMENT, OPTIMIZER_MOMENTS

if TYPE_CHECKING:
    import torch

SLICES = 16
"""Tensors that parameters are spread over."""
BOTH_WAYS = {"tensorwise": 2 + 2 + 1 + 1, "rowwise": 2 + 2 + 1 + 1, "blockwise": 2 + 1 + 1}
"""Bytes per number of writing 8 bits as they are and transposed: where a scale is of more than a
block it has to be found first, by a pass of its own."""


def _logits(case: BenchCase, draw: TensorFactory) -> "tuple[torch.Tensor, torch.Tensor]":
    tokens, vocab = case.size("tokens"), case.size("vocab")
    return draw(tokens, vocab), draw.make_integers(vocab, tokens)


def _loss_in_place(case: BenchCase, draw: TensorFactory) -> Call:
    import torch

    from meshwright.run.kernels.loss.cross_entropy_kernel import (
        CrossEntropyOptions,
        cross_entropy_rows_,
        cross_entropy_rows_reference_,
    )

    logits, labels = _logits(case, draw)
    nats, lse = (torch.empty(len(labels), device=draw.device) for _ in range(2))
    rule = CrossEntropyOptions(ignore_index=-100, softcap=None, scale=None, z_loss=0.0)
    turn = cross_entropy_rows_ if draw.has_triton else cross_entropy_rows_reference_
    return lambda: turn(logits, labels, nats, lse, rule, gradient=True)


def _loss_in_place_bytes(case: BenchCase, each_bytes: int) -> float:
    return bytes_moved("loss_in_place", float(case.size("tokens") * case.size("vocab")), each_bytes)


def _cross_entropy(case: BenchCase, draw: TensorFactory) -> Call:
    from torch.nn.functional import cross_entropy

    logits, labels = _logits(case, draw)
    logits = logits.float()
    if case.name == "cross_entropy":
        return lambda: cross_entropy(logits, labels)
    loss = cross_entropy(logits.requires_grad_(), labels)
    return make_backward_call((loss,), (logits,), (loss.detach(),))


def _cross_entropy_bytes(case: BenchCase, _: int) -> float:
    op: MemoryOp = "cross_entropy" if case.name == "cross_entropy" else "cross_entropy_backward"
    return bytes_moved(op, float(case.size("tokens") * case.size("vocab")), 4.0)


def _quantise(case: BenchCase, draw: TensorFactory) -> Call:
    from meshwright.run.kernels.fp8 import quantization

    x = draw(case.size("tokens"), case.size("width"))
    match case.text("scaling"):
        case "tensorwise":
            return lambda: quantization.quantize_tensorwise(x, transpose=True)
        case "rowwise":
            return lambda: quantization.quantize_rowwise(x, transpose=True)
        case _:
            return lambda: quantization.quantize_blockwise(x, "1x128", transpose=True)


def _quantise_bytes(case: BenchCase, _: int) -> float:
    return float(BOTH_WAYS[case.text("scaling")] * case.size("tokens") * case.size("width"))


def _cast(case: BenchCase, draw: TensorFactory) -> Call:
    import torch

    x = draw(case.size("tokens"), case.size("width"), dtype=torch.bfloat16)
    return x.float


def _cast_bytes(case: BenchCase, _: int) -> float:
    return bytes_moved("cast", float(case.size("tokens") * case.size("width")))


def _parameters(case: BenchCase, draw: TensorFactory) -> "tuple[torch.Tensor, ...]":
    each = case.size("parameters") // SLICES
    return tuple(draw(each) for _ in range(SLICES))


def _adamw(case: BenchCase, draw: TensorFactory) -> Call:
    import torch

    from meshwright.run.kernels.optimizer.fused_update import FusedOptimizerUpdate
    from meshwright.run.kernels.optimizer.global_index import GlobalIndexMap
    from meshwright.run.kernels.optimizer.update_inputs import (
        OptimizerTensors,
        UpdateRule,
        allocate_moment,
        make_step_scalars,
    )

    params, grads = _parameters(case, draw), _parameters(case, draw)
    rule = UpdateRule("adamw", 0.9, 0.95, 1e-8)
    moments = case.text("moments")
    assert moments in ("fp32", "bf16", "int8"), moments
    tensors = OptimizerTensors(
        params=params,
        masters=tuple(each.float() for each in params) if case.text("masters") == "fp32" else (),
        moments=tuple(allocate_moment(params, moments, index) for index in range(2)),  # type: ignore[arg-type]
        rounding_keys=tuple(range(SLICES)),
        lr_multipliers=(1.0,) * SLICES,
        weight_decays=(0.1,) * SLICES,
        global_index_maps=(GlobalIndexMap(),) * SLICES,
    )
    update = FusedOptimizerUpdate(tensors, rule)
    step = torch.ones((), dtype=torch.int64, device=draw.device)
    now = make_step_scalars(step, 1e-5, rule)
    return lambda: update(grads, now)


def _adamw_bytes(case: BenchCase, each_bytes: int) -> float:
    moments = 2 * OPTIMIZER_MOMENTS["adamw"] * BYTES_PER_ELEMENT[case.text("moments")]
    master = BYTES_PER_ELEMENT[case.text("masters")]
    weights = 2 * master + each_bytes if master else 2 * each_bytes
    return float((moments + weights + each_bytes) * case.size("parameters"))


def _accumulate(case: BenchCase, draw: TensorFactory) -> Call:
    import torch

    totals, made = _parameters(case, draw), _parameters(case, draw)
    return lambda: torch._foreach_add_(totals, made)


def _accumulate_bytes(case: BenchCase, each_bytes: int) -> float:
    return 3.0 * each_bytes * case.size("parameters")


def _gradient_norm(case: BenchCase, draw: TensorFactory) -> Call:
    from meshwright.run.kernels.optimizer.grad_norm import compute_grad_norm
    from meshwright.run.kernels.optimizer.multi_tensor import TensorList

    grads = _parameters(case, draw)
    listed = TensorList.from_tensors(grads) if draw.has_triton else grads
    return lambda: compute_grad_norm(listed)


def _gradient_norm_bytes(case: BenchCase, each_bytes: int) -> float:
    return bytes_moved("gradient_norm", float(case.size("parameters")), each_bytes)


def _logits_of(*shapes: tuple[int, int]) -> tuple[Sizes, ...]:
    return tuple({"tokens": tokens, "vocab": vocab} for tokens, vocab in shapes)


def _states(*kinds: tuple[int, str, str]) -> tuple[Sizes, ...]:
    return tuple(
        {"parameters": number, "masters": masters, "moments": moments}
        for number, masters, moments in kinds
    )


def _scaled(*kinds: tuple[str, int, int]) -> tuple[Sizes, ...]:
    return tuple(
        {"scaling": scaling, "tokens": tokens, "width": width} for scaling, tokens, width in kinds
    )


_LARGE, _SMALL = 1 << 28, 1 << 24
_LISTS: tuple[Sizes, ...] = ({"parameters": _LARGE}, {"parameters": _SMALL})
_HOST_LIST: Sizes = {"parameters": 1 << 20}
_HOST_LOGITS = _logits_of((128, 8192))[0]

STEP_KERNELS = (
    BenchKernel("optimizer", "adamw", _states((_LARGE, "fp32", "fp32"), (_LARGE, "none", "bf16"),
           (_SMALL, "fp32", "fp32"), (_LARGE, "none", "int8")),
           _states((1 << 20, "none", "fp32"))[0], _adamw, _adamw_bytes),
    BenchKernel("loss_in_place", "linear_cross_entropy rows",
           _logits_of((8192, 128256), (16384, 32000), (4096, 151936)), _HOST_LOGITS,
           _loss_in_place, _loss_in_place_bytes),
    BenchKernel("gradient_norm", "gradient_norm", _LISTS, _HOST_LIST, _gradient_norm,
           _gradient_norm_bytes),
    BenchKernel("quantise", "quantize_fp8", _scaled(("tensorwise", 16384, 4096),
           ("rowwise", 16384, 4096), ("blockwise", 16384, 4096), ("tensorwise", 8192, 14336),
           ("rowwise", 4096, 2048), ("blockwise", 8192, 8192)),
           _scaled(("tensorwise", 256, 256))[0], _quantise, _quantise_bytes, needs_fp8=True),
    BenchKernel("accumulate", "accumulate", _LISTS, _HOST_LIST, _accumulate, _accumulate_bytes),
    BenchKernel("cast", "float", list_sizes_by_tokens((16384, 4096), (4096, 4096)),
           list_sizes_by_tokens((1024, 1024))[0], _cast, _cast_bytes),
    BenchKernel("cross_entropy", "cross_entropy", _logits_of((4096, 128256), (8192, 32000)),
           _HOST_LOGITS, _cross_entropy, _cross_entropy_bytes),
    BenchKernel("cross_entropy_backward", "cross_entropy backward",
           _logits_of((4096, 128256), (8192, 32000)), _HOST_LOGITS, _cross_entropy,
           _cross_entropy_bytes),
)  # fmt: skip
"""In the order of what a step spends on them."""
