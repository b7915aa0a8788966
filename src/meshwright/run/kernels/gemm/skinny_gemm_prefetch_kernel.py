"""The kernel of `skinny_linear` that holds weights before it may begin (Gluon, for Hopper).

The first steps' tiles of the weight are copied into shared memory while the kernel before still
runs; only the rows have to wait. The weight must therefore not be what the kernel right before
wrote. Stages are said one by one, which Triton's own pipelining does not allow.
"""

# Triton compiles these functions itself: their arguments are its own values, not Python's.
# mypy: ignore-errors
# ruff: noqa: PLR0915, PLR0917

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from meshwright.run.kernels.activation.glu import activate_and_gate
from meshwright.run.kernels.triton_compat import tl, triton, wait_for_inputs

# Its name changed between Triton 3.6 and 3.9.
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


def make_tma_descriptor(matrix: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Describe tiles of a matrix of 16-bit numbers for tensor-memory copies."""
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


# Not compiled anew for a number of rows that happens to be 1 or a multiple of 16.
@gluon.jit(do_not_specialize=["rows"])
def skinny_gemm_prefetch_kernel(
    x,
    weight,
    out,
    limit,
    rows,
    columns,
    inner,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
    TURNED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    PDL: gl.constexpr,
):
    """Compute one tile of the result: of a product, or of gate and up with their activation."""
    GATED: gl.constexpr = ACTIVATION is not None
    blocks = (rows + ROWS - 1) // ROWS
    program = gl.program_id(0)
    # Programs that read the same part of the weight are neighbours: one of them fetches it.
    column = program // blocks * COLUMNS
    row = program % blocks * ROWS
    steps = inner // DEPTH
    somes = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, DEPTH], x.layout)
    gates = gl.allocate_shared_memory(weight.dtype, [STAGES, COLUMNS, DEPTH], weight.layout)
    ups = gates
    if GATED:
        ups = gl.allocate_shared_memory(weight.dtype, [STAGES, COLUMNS, DEPTH], weight.layout)
    bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(bars.index(stage), count=1)
    for stage in gl.static_range(STAGES):
        _copy_weight(
            weight, gates, ups, bars, stage, stage, stage < steps, column, columns,
            ROWS, COLUMNS, DEPTH, GATED,
        )  # fmt: skip
    wait_for_inputs(PDL)
    for stage in gl.static_range(STAGES):
        bar, some = bars.index(stage), somes.index(stage)
        _copy(x, [row, stage * DEPTH], bar, some, pred=stage < steps)
    TALL: gl.constexpr = COLUMNS if TURNED else ROWS
    WIDE: gl.constexpr = ROWS if TURNED else COLUMNS
    DOWN: gl.constexpr = WARPS if TALL >= 16 * WARPS else 4
    SHAPE: gl.constexpr = [16, WIDE * DOWN // WARPS, 16]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [DOWN, WARPS // DOWN], SHAPE)
    one = gl.zeros((TALL, WIDE), gl.float32, layout=layout)
    two = one
    stage = 0
    phase = 0
    for step in range(steps):
        mbarrier.wait(bars.index(stage), phase)
        some = somes.index(stage)
        # This leaves the products of this step alone under way.
        one_begun = _multiply(some, gates.index(stage), one, TURNED)
        if GATED:
            two_begun = _multiply(some, ups.index(stage), two, TURNED)
            one, two = warpgroup_mma_wait(num_outstanding=2, deps=(one_begun, two_begun))
        else:
            one = warpgroup_mma_wait(num_outstanding=1, deps=(one_begun,))
        # What the step before read is free, once all warps are done with it.
        _together()
        free = gl.where(stage == 0, STAGES - 1, stage - 1)
        new = step - 1 + STAGES
        wanted = (step > 0) & (new < steps)
        _copy_weight(
            weight, gates, ups, bars, new, free, wanted, column, columns,
            ROWS, COLUMNS, DEPTH, GATED,
        )  # fmt: skip
        bar, some = bars.index(free), somes.index(free)
        _copy(x, [row, new * DEPTH], bar, some, pred=wanted)
        stage += 1
        phase = gl.where(stage == STAGES, phase ^ 1, phase)
        stage = gl.where(stage == STAGES, 0, stage)
    if GATED:
        value, up = warpgroup_mma_wait(num_outstanding=0, deps=(one, two))
        value = activate_and_gate(value, up, limit, ACTIVATION)
    else:
        value = warpgroup_mma_wait(num_outstanding=0, deps=(one,))
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(bars.index(stage))
    value = value.to(out.dtype.element_ty)
    _store(out, value, row, rows, column, columns, ROWS, COLUMNS, WARPS, TURNED)


@gluon.jit
def _copy_weight(
    weight, gates, ups, bars, step, stage, wanted, column, columns,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, DEPTH: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Begin to copy a step's tiles of the weight; its barrier waits for those of x, too."""
    BYTES: gl.constexpr = (ROWS + (2 * COLUMNS if GATED else COLUMNS)) * DEPTH * 2
    bar = bars.index(stage)
    mbarrier.expect(bar, BYTES, pred=wanted)
    at = step * DEPTH
    _copy(weight, [column, at], bar, gates.index(stage), pred=wanted)
    if GATED:
        # Past the last column of the gate are rows of up: nobody stores what comes of them.
        below = columns + column
        _copy(weight, [below, at], bar, ups.index(stage), pred=wanted)


@gluon.jit
def _multiply(some, weight, total, TURNED: gl.constexpr):
    """Begin to add a product to a total; turned, the weight's rows are those of the result."""
    if TURNED:
        begun = warpgroup_mma(weight, some.permute((1, 0)), total, is_async=True)
    else:
        begun = warpgroup_mma(some, weight.permute((1, 0)), total, is_async=True)
    return begun


@gluon.jit
def _store(
    out, value, row, rows, column, columns,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, WARPS: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    """Store a tile, 16 bytes of a row at a time."""
    if TURNED:
        value = value.trans()
    ACROSS: gl.constexpr = COLUMNS // 8 if COLUMNS < 256 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    value = gl.convert_layout(value, layout)
    line = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    place = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    inside = (line < rows)[:, None] & (place < columns)[None, :]
    gl.store(out + line[:, None] * columns + place[None, :], value, mask=inside)


@triton.jit
def _together():
    """Wait for all warps; Gluon's own name for it changes with its versions."""
    tl.debug_barrier()
