"""AdamW over all parameters in one launch, and the rules that are AdamW with a part left out.

An update reads the gradient, the weight (its float32 master where there is one) and the moments,
and writes all but the gradient. Weights without a master and moments below float32 are rounded by
chance (`stochastic_rounding`), 8-bit moments by blocks (`block_quantization`). Clipping, loss
scaling, the learning rate and whether the step happens at all are numbers on the device (`pace`),
so that the host never waits.

Bytes per parameter, the floor (read + written, gradient in bfloat16):

    float32 weights and moments                     14 + 12
    bfloat16 weights, float32 master and moments    14 + 14     (the weight is only written)
    bfloat16 weights and moments                     8 +  6
    bfloat16 weights, 8-bit moments                  6 +  4     (and 1/16 for scales)

Compiled for Hopper, a parameter in bfloat16 throughout takes 43 instructions, where an H200 issues
96 while its 14 bytes pass; with 8-bit moments 58 and 69. Shards with gaps between their elements
in the whole (`places`) take about 6 more, and 3 to 4 for each of several stacked matrices.
"""

# Triton compiles some of these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from meshwright.run.kernels.optimizer.block_quantization import BLOCK_ELEMENTS
from meshwright.run.kernels.optimizer.global_index import (
    count_max_gaps,
    find_first_global_index,
    make_index_table,
)
from meshwright.run.kernels.optimizer.multi_tensor import (
    ALIGNMENT_BYTES,
    CHUNK_ELEMENTS,
    MIXED_DTYPES,
    TensorList,
    find_chunk,
    load_tensor_pointer,
)
from meshwright.run.kernels.optimizer.stochastic_rounding import make_rounding_keys
from meshwright.run.kernels.optimizer.update_inputs import (
    OptimizerMoment,
    OptimizerTensors,
    StepScalars,
    UpdateRule,
)
from meshwright.run.kernels.optimizer.update_kernel import update_tile
from meshwright.run.kernels.optimizer.update_reference import update_reference_
from meshwright.run.kernels.triton_compat import KernelBackend, should_use_triton, tl, triton

WARPS = 8
QUANTIZED_WARPS = 1
"""With 8-bit moments a warp is a program of its own: storing the scales of several warps would make
them wait for one another."""
QUANTIZED_CHUNK_ELEMENTS = 8192
"""Elements of a chunk then: a single warp takes long for as many as others have, and most of the
GPU would idle while the last ones end."""
_BLOCK = tl.constexpr(BLOCK_ELEMENTS)


class FusedOptimizerUpdate:
    """Parameters and their state under one rule, updated in place, all at once.

    Tables of addresses are made at the first update and renewed where tensors moved.
    """

    def __init__(
        self, tensors: OptimizerTensors, rule: UpdateRule, *, backend: KernelBackend = "auto"
    ) -> None:
        assert len(tensors.moments) == rule.num_moments
        self.tensors = tensors
        self.rule = rule
        self._on_triton = should_use_triton(backend, tensors.params[0])
        self._tables: _Tables | None = None

    def __call__(self, grads: Sequence[torch.Tensor], pace: StepScalars) -> None:
        """Update everything; `grads` are given in the order of the parameters."""
        if not self._on_triton:
            update_reference_(self.tensors, grads, pace, self.rule)
            return
        if self._tables is None:
            self._tables = _tables(self.tensors, grads)
        params = self._tables.params.repoint(self.tensors.params)
        listed = self._tables.grads.repoint(grads)
        self._tables = self._tables._replace(params=params, grads=listed)
        _launch(self._tables, self.tensors, self.rule, pace)
        # Gradients are the caller's: holding them here would keep their memory through forward.
        self._tables = self._tables._replace(grads=listed.release())
        if self.rule.writes_weights:
            # Autograd and the fp8 copies of weights learn from it that the weights are new.
            torch.autograd.graph.increment_version(self.tensors.params)


class _Tables(NamedTuple):
    """What the kernel finds its tensors by."""

    params: TensorList
    grads: TensorList
    others: tuple[torch.Tensor, ...]
    """int64 [tensors] each: addresses of masters, moments and scales; of parameters where there
    are none, which the kernel then does not look at."""
    others_aligned: bool
    """Whether masters and moments begin at multiples of 16 bytes."""
    keys: torch.Tensor
    places: torch.Tensor
    shares: torch.Tensor
    decays: torch.Tensor


def _tables(tensors: OptimizerTensors, grads: Sequence[torch.Tensor]) -> _Tables:
    coded = any(each.scales for each in tensors.moments)
    params = TensorList.from_tensors(
        tensors.params, chunk_elements=QUANTIZED_CHUNK_ELEMENTS if coded else CHUNK_ELEMENTS
    )
    device = params.addresses.device

    def addresses(held: tuple[torch.Tensor, ...]) -> torch.Tensor:
        pointers = [each.data_ptr() for each in held]
        return torch.tensor(pointers, device=device) if held else params.addresses

    moments = (*tensors.moments, OptimizerMoment(()), OptimizerMoment(()))[:2]
    states = [*tensors.masters, *(value for each in moments for value in each.values)]
    return _Tables(
        params=params,
        grads=params.with_chunks_of(grads),
        others=(
            addresses(tensors.masters),
            *(addresses(moment.values) for moment in moments),
            *(addresses(moment.scales) for moment in moments),
        ),
        others_aligned=all(each.data_ptr() % ALIGNMENT_BYTES == 0 for each in states),
        keys=torch.tensor(tensors.rounding_keys, device=device),
        places=make_index_table(tensors.global_index_maps, device),
        shares=torch.tensor(tensors.lr_multipliers, device=device),
        decays=torch.tensor(tensors.weight_decays, device=device),
    )


def _launch(
    tables: _Tables, tensors: OptimizerTensors, rule: UpdateRule, pace: StepScalars
) -> None:
    params, grads, chunks = tables.params, tables.grads, tables.params.chunks
    assert MIXED_DTYPES not in {params.common_dtype_code, grads.common_dtype_code}
    if not chunks.num_chunks:
        return
    moment = tensors.moments[0].dtype_name if tensors.moments else "fp32"
    warps = QUANTIZED_WARPS if moment == "int8" else WARPS
    _update_chunks[(chunks.num_chunks,)](
        params.addresses,
        grads.addresses,
        *tables.others,
        tables.keys,
        tables.places,
        tables.shares,
        tables.decays,
        *chunks.tables,
        pace.scalars,
        pace.step,
        rule.beta1,
        1 - rule.beta1,
        rule.beta2,
        1 - rule.beta2,
        rule.eps,
        RULE=rule.name,
        NESTEROV=rule.nesterov,
        WRITES=rule.writes_weights,
        PARAM=_triton_type(tensors.params[0].dtype),
        GRAD=_triton_type(grads.tensors[0].dtype),
        MASTER=bool(tensors.masters),
        MOMENT=moment,
        GAPS=count_max_gaps(tensors.global_index_maps),
        ALIGNED=params.is_aligned and grads.is_aligned and tables.others_aligned,
        TILE=_tile(tensors, grads, warps),
        num_warps=warps,
    )


def _tile(tensors: OptimizerTensors, grads: TensorList, warps: int) -> int:
    """Return the elements a program works on at a time.

    Each thread moves 16 bytes of the widest type. With more, Triton would pass results between
    threads before it stores them. Elements that share a scale stay together.
    """
    widest = [tensors.params[0], grads.tensors[0], *tensors.masters[:1]]
    widest += [each.values[0] for each in tensors.moments]
    tile = warps * 32 * 16 // max(each.element_size() for each in widest)
    return max(tile, BLOCK_ELEMENTS)


def _triton_type(kind: torch.dtype) -> Any:
    return getattr(tl, str(kind).removeprefix("torch."))


@triton.jit
def _update_chunks(
    weights,
    grads,
    masters,
    firsts,
    seconds,
    first_scales,
    second_scales,
    keys,
    places,
    shares,
    decays,
    chunk_tensors,
    chunk_starts,
    chunk_lengths,
    pace,
    step,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    RULE: tl.constexpr,
    NESTEROV: tl.constexpr,
    WRITES: tl.constexpr,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MASTER: tl.constexpr,
    MOMENT: tl.constexpr,
    GAPS: tl.constexpr,
    ALIGNED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Update one chunk of one tensor."""
    if tl.load(pace) == 0:
        return
    index = tl.program_id(0)
    tensor, start, length = find_chunk(chunk_tensors, chunk_starts, chunk_lengths, index)
    weight = load_tensor_pointer(weights, tensor, PARAM, ALIGNED) + start
    grad = load_tensor_pointer(grads, tensor, GRAD, ALIGNED) + start
    master = load_tensor_pointer(masters, tensor, tl.float32, ALIGNED) + start
    if MOMENT == "int8":
        first = load_tensor_pointer(firsts, tensor, tl.int8, ALIGNED) + start
        second = load_tensor_pointer(seconds, tensor, tl.uint8, ALIGNED) + start
    elif MOMENT == "bf16":
        first = load_tensor_pointer(firsts, tensor, tl.bfloat16, ALIGNED) + start
        second = load_tensor_pointer(seconds, tensor, tl.bfloat16, ALIGNED) + start
    else:
        first = load_tensor_pointer(firsts, tensor, tl.float32, ALIGNED) + start
        second = load_tensor_pointer(seconds, tensor, tl.float32, ALIGNED) + start
    first_scale = load_tensor_pointer(first_scales, tensor, tl.float32, False) + start // _BLOCK
    second_scale = load_tensor_pointer(second_scales, tensor, tl.float32, False) + start // _BLOCK
    stretch = (weight, grad, master, first, second, first_scale, second_scale)

    lr = tl.load(pace + 2)
    size = lr * tl.load(shares + tensor) * tl.load(pace + 3)
    keep = 1 - lr * tl.load(decays + tensor)
    numbers = (tl.load(pace + 1), size, keep, tl.load(pace + 4), beta1, rest1, beta2, rest2, eps)
    of_step = make_rounding_keys(tl.load(keys + tensor), tl.load(step))
    chance = (of_step, find_first_global_index(places, tensor, start, GAPS))
    for begin in range(0, length, TILE):
        # A mask that may change within 16 bytes would make every access a single element.
        if length - begin >= TILE:
            update_tile(
                stretch, numbers, chance, begin, length,
                RULE, NESTEROV, WRITES, MASTER, MOMENT, GAPS, TILE, False,
            )  # fmt: skip
        else:
            update_tile(
                stretch, numbers, chance, begin, length,
                RULE, NESTEROV, WRITES, MASTER, MOMENT, GAPS, TILE, True,
            )  # fmt: skip
