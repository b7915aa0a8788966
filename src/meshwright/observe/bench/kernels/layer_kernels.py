"""Kernels within a model's layers that memory bounds: norms, rotations, gates, sums, permutations.

Bytes are counted as `predict/step/block_time.py` counts them for this trainer, which is not always
what a kernel moves: backward of a rotation copies the values, and a permutation reads a token once
for all its copies. The fitted share takes it up. Backward of a gate that writes the gate's result
once more counts that: such recomputation is priced by itself.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

from meshwright.observe.bench.bench_case import BenchCase
from meshwright.observe.bench.kernels.bench_kernel import BenchKernel, Sizes, TensorFactory
from meshwright.observe.bench.timing import Call
from meshwright.predict.cost.curves import MemoryOp
from meshwright.predict.cost.memory_bound import bytes_moved

if TYPE_CHECKING:
    import torch

EPS = 1e-5
PassDirection = Literal["forward", "backward"]


def list_sizes_by_tokens(*shapes: tuple[int, int]) -> tuple[Sizes, ...]:
    """Return sizes by tokens and width."""
    return tuple({"tokens": tokens, "width": width} for tokens, width in shapes)


def _shape(case: BenchCase) -> tuple[int, int]:
    return case.size("tokens"), case.size("width")


def _numbers(op: MemoryOp, case: BenchCase, each_bytes: int, times: int = 1) -> float:
    tokens, width = _shape(case)
    return bytes_moved(op, float(times * tokens * width), each_bytes)


def make_backward_call(
    outputs: "tuple[torch.Tensor, ...]",
    inputs: "tuple[torch.Tensor, ...]",
    given: "tuple[torch.Tensor, ...]",
) -> Call:
    """Return a call of the backward pass alone, again and again."""
    import torch

    return lambda: torch.autograd.grad(outputs, inputs, given, retain_graph=True)


def _norm(case: BenchCase, draw: TensorFactory, way: PassDirection) -> Call:
    from meshwright.run.kernels.norm.rms_norm import add_rms_norm

    shape = _shape(case)
    x, residual, weight = draw(*shape), draw(*shape), draw(shape[1])
    if way == "forward":
        return lambda: add_rms_norm(x, residual, weight, EPS)
    inputs = tuple(each.requires_grad_() for each in (x, residual, weight))
    outputs = add_rms_norm(x, residual, weight, EPS)
    return make_backward_call(outputs, inputs, (draw(*shape), draw(*shape)))


def _norm_bytes(case: BenchCase, each_bytes: int) -> float:
    # Stream and branch are read, sum and norm written; backward the same the other way.
    tokens, width = _shape(case)
    return 4.0 * each_bytes * tokens * width


def _rotary(case: BenchCase, draw: TensorFactory, way: PassDirection) -> Call:
    import torch

    from meshwright.run.kernels.rotary.rotary import QKVSizes, split_qkv_apply_rotary

    tokens = case.size("tokens")
    sizes = QKVSizes(*(case.size(name) for name in ("heads", "kv_heads", "head_dim")))
    angle = draw(tokens, sizes.head_dim // 2, dtype=torch.float32)
    turns = angle.cos(), angle.sin()
    qkv = draw(1, tokens, sizes.width)
    if way == "forward":
        return lambda: split_qkv_apply_rotary(qkv, *sizes, *turns)
    # A leaf would be copied first; the gradient of a clone is passed on as it is.
    three = split_qkv_apply_rotary(qkv.requires_grad_().clone(), *sizes, *turns)
    # Attention leaves these without the gaps that q, k and v have between tokens.
    given = tuple(draw(*each.shape) for each in three)
    return make_backward_call(three, (qkv,), given)


def _rotary_bytes(case: BenchCase, each_bytes: int) -> float:
    turned = case.size("heads") + case.size("kv_heads")
    return bytes_moved(
        "rotary", float(case.size("tokens") * turned * case.size("head_dim")), each_bytes
    )


def _gate(case: BenchCase, draw: TensorFactory) -> Call:
    from meshwright.run.kernels.activation.glu import glu

    tokens, width = _shape(case)
    gate_up = draw(tokens, 2 * width)
    return lambda: glu(gate_up, "silu")


def _ungate(case: BenchCase, draw: TensorFactory, *, again: bool) -> Call:
    from meshwright.run.kernels.activation.glu import DEFAULT_CLAMP_LIMIT, glu, glu_backward

    tokens, width = _shape(case)
    gate_up, given = draw(tokens, 2 * width), draw(tokens, width)
    if draw.has_triton:
        return lambda: glu_backward(gate_up, given, "silu", DEFAULT_CLAMP_LIMIT, again=again)
    out = glu(gate_up.requires_grad_(), "silu")
    return make_backward_call((out,), (gate_up,), (given,))


def _ungate_again_bytes(case: BenchCase, each_bytes: int) -> float:
    # Gate, up and the gradient are read; the gradients of both and the result are written.
    tokens, width = _shape(case)
    return 6.0 * each_bytes * tokens * width


def _residual(case: BenchCase, draw: TensorFactory) -> Call:
    import torch

    one, other = draw(*_shape(case)), draw(*_shape(case))
    return lambda: torch.add(one, other)


def _copy(case: BenchCase, draw: TensorFactory) -> Call:
    here = draw(*_shape(case))
    return here.clone


def _embedding(case: BenchCase, draw: TensorFactory, way: PassDirection) -> Call:
    from meshwright.run.kernels.embedding import embedding

    tokens, width = _shape(case)
    table, numbers = draw(case.size("vocab"), width), draw.make_integers(case.size("vocab"), tokens)
    if way == "forward":
        return lambda: embedding(numbers, table)
    rows = embedding(numbers, table.requires_grad_())
    return make_backward_call((rows,), (table,), (draw(tokens, width),))


def _softmax(case: BenchCase, draw: TensorFactory) -> Call:
    import torch

    scores = draw(case.size("tokens"), case.size("experts"), dtype=torch.float32)
    return lambda: torch.softmax(scores, -1)


def _softmax_bytes(case: BenchCase, _: int) -> float:
    # Scores of a router are of 32 bits whatever the layers are.
    return bytes_moved("softmax", float(case.size("tokens") * case.size("experts")), 4.0)


def _experts(case: BenchCase, draw: TensorFactory, move: Literal["dispatch", "combine"]) -> Call:
    import torch

    from meshwright.run.kernels.moe.token_permutation import permute, sort_by_expert, unpermute

    (tokens, width), chosen, experts = _shape(case), case.size("top_k"), case.size("experts")
    weights, picked = torch.rand(tokens, experts, device=draw.device).topk(chosen)
    order = sort_by_expert(picked, experts)
    if move == "dispatch":
        x = draw(tokens, width)
        return lambda: permute(x, order)
    y = draw(tokens * chosen, width)
    return lambda: unpermute(y, order, weights)


def _experts_bytes(case: BenchCase, each_bytes: int) -> float:
    return _numbers("permute", case, each_bytes, case.size("top_k"))


def _turns(*shapes: tuple[int, int, int, int]) -> tuple[Sizes, ...]:
    names = ("tokens", "heads", "kv_heads", "head_dim")
    return tuple(dict(zip(names, shape, strict=True)) for shape in shapes)


def _routes(*shapes: tuple[int, int, int, int]) -> tuple[Sizes, ...]:
    names = ("tokens", "width", "experts", "top_k")
    return tuple(dict(zip(names, shape, strict=True)) for shape in shapes)


def _plain(op: MemoryOp, times: int = 1) -> Callable[[BenchCase, int], float]:
    return partial(_numbers, op, times=times)


_STREAM = list_sizes_by_tokens((16384, 4096), (8192, 2048), (32768, 8192), (2048, 4096))
_INNER = list_sizes_by_tokens((16384, 14336), (8192, 8192), (32768, 3072), (2048, 8192))
_HEADS = _turns((16384, 32, 8, 128), (8192, 32, 8, 64), (4096, 24, 8, 128))
_ROUTED = _routes((8192, 2048, 128, 8), (16384, 4096, 64, 2), (2048, 2048, 64, 6))
_WORDS: tuple[Sizes, ...] = tuple(
    {"tokens": tokens, "width": width, "vocab": vocab}
    for tokens, width, vocab in ((16384, 4096, 128256), (8192, 2048, 50304))
)
_HOST_STREAM: Sizes = {"tokens": 1024, "width": 1024}
_HOST_HEADS = _turns((1024, 8, 2, 64))[0]
_HOST_ROUTED = _routes((512, 512, 8, 2))[0]
_HOST_WORDS: Sizes = {"tokens": 1024, "width": 512, "vocab": 4096}

LAYER_KERNELS = (
    BenchKernel("norm", "add_rms_norm", _STREAM, _HOST_STREAM, partial(_norm, way="forward"),
           _norm_bytes),
    BenchKernel("norm_backward", "add_rms_norm backward", _STREAM, _HOST_STREAM,
           partial(_norm, way="backward"), _norm_bytes),
    BenchKernel("activation", "glu", _INNER, _HOST_STREAM, _gate, _plain("activation", 2)),
    BenchKernel("activation_backward", "glu backward", _INNER, _HOST_STREAM,
           partial(_ungate, again=False), _plain("activation_backward", 2)),
    BenchKernel("activation_backward", "glu_linear backward", _INNER[:2], _HOST_STREAM,
           partial(_ungate, again=True), _ungate_again_bytes, in_quick_bench=False),
    BenchKernel("rotary", "split_rotate", _HEADS, _HOST_HEADS, partial(_rotary, way="forward"),
           _rotary_bytes),
    BenchKernel("rotary", "split_rotate backward", _HEADS, _HOST_HEADS,
           partial(_rotary, way="backward"), _rotary_bytes),
    BenchKernel("residual", "add", _STREAM[:3], _HOST_STREAM, _residual, _plain("residual")),
    BenchKernel("copy", "clone", _STREAM[:3], _HOST_STREAM, _copy, _plain("copy")),
    BenchKernel("copy", "embedding", _WORDS, _HOST_WORDS, partial(_embedding, way="forward"),
           _plain("copy"), in_quick_bench=False),
    # Priced as a copy of its rows too, and no copy: it writes a gradient of the whole table.
    BenchKernel("embedding_backward", "embedding backward", _WORDS, _HOST_WORDS,
           partial(_embedding, way="backward"), _plain("copy"), in_quick_bench=False),
    BenchKernel("permute", "dispatch", _ROUTED, _HOST_ROUTED, partial(_experts, move="dispatch"),
           _experts_bytes),
    BenchKernel("unpermute", "combine", _ROUTED, _HOST_ROUTED, partial(_experts, move="combine"),
           _experts_bytes),
    BenchKernel("softmax", "softmax", tuple(
        {"tokens": tokens, "experts": experts} for tokens, experts in ((32768, 256), (16384, 128))
    ), {"tokens": 1024, "experts": 64}, _softmax, _softmax_bytes),
)  # fmt: skip
"""In the order of what a step spends on them."""
