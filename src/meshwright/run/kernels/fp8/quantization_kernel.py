"""The kernels that write matrices in fp8; `quantization_launch` launches them.

`amax` is the largest magnitude, `scale` what fp8 numbers are multiplied with to get back.
"""

# Triton compiles these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

from meshwright.run.kernels.triton_compat import tl, triton

BLOCK_SIDE = 128
"""Side of a tile that is also written transposed: one cache line of fp8 both ways."""
MIN_AMAX = 2.0**-100
"""Stands for smaller magnitudes, zero included: with it no scale is zero and no factor infinite."""
_SIDE = tl.constexpr(BLOCK_SIDE)
_LEAST = tl.constexpr(MIN_AMAX)


@triton.jit
def _scale_for(amax, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """Return the scale that takes the format's largest number to `amax`, or the next power of 2."""
    scale = tl.maximum(amax, _LEAST, propagate_nan=tl.PropagateNan.ALL) * (1.0 / LARGEST)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        even = ((bits + 0x007FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
        scale = tl.where(bits > 0x7F800000, scale, even)  # NaN stays
    return scale


@triton.jit
def _narrow(value, scale, kind: tl.constexpr, LARGEST: tl.constexpr):
    """Divide by the scale and round, saturating; NaN stays NaN."""
    value = value.to(tl.float32) * (1.0 / scale)
    if kind == tl.float32:
        # Interpreted. The conversion to fp8 saturates by itself.
        value = tl.clamp(value, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    return value.to(kind)


@triton.jit
def _magnitude(value):
    """Return integers that are ordered as the magnitudes are, NaN above all.

    Floats themselves would have to be widened here; the compiler would then keep them, wide, until
    they are written, and so in twice the registers.
    """
    if value.dtype == tl.bfloat16:
        bits = value.to(tl.int16, bitcast=True) & 0x7FFF
    else:
        bits = value.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return bits


@triton.jit
def _float_bits(magnitude, kind: tl.constexpr):
    """Return the bits of float32 of what `_magnitude` made of a number of some type."""
    if kind == tl.bfloat16:
        magnitude = magnitude.to(tl.int32) << 16
    return magnitude


@triton.jit
def _amax(magnitude, kind: tl.constexpr):
    """Return what `_magnitude` made of a number as float32."""
    return _float_bits(magnitude, kind).to(tl.float32, bitcast=True)


@triton.jit
def _raise(pointer, bits, mask):
    """Take maxima in memory: non-negative floats are ordered as their bits are, in any order."""
    tl.atomic_max(pointer, bits, mask=mask, sem="relaxed")


@triton.jit
def amax_kernel(x, amax, count, EVEN: tl.constexpr, BLOCK: tl.constexpr):
    """Raise one number to the largest magnitude of a stretch."""
    start = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    if EVEN:
        value = tl.load(x + start + lane)
    else:
        value = tl.load(x + start + lane, mask=lane < count - start, other=0)
    _raise(amax, _float_bits(tl.max(_magnitude(value), axis=0), value.dtype), None)


@triton.jit
def line_amax_kernel(x, row_amax, column_amax, height, width, EVEN: tl.constexpr):
    """Raise what is kept for the rows, the columns or both of a tile."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    _, _, row, column, value, _ = _tile(x, tile, height, width, EVEN)
    magnitude = _magnitude(value)
    if row_amax is not None:
        bits = _float_bits(tl.max(magnitude, axis=1), value.dtype)
        _raise(row_amax + row, bits, row < height)
    if column_amax is not None:
        bits = _float_bits(tl.max(magnitude, axis=0), value.dtype)
        _raise(column_amax + column, bits, column < width)


@triton.jit
def _larger_pair(one, other):
    """Compare both halves of two words at a time, in one instruction; not to be interpreted."""
    return tl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [one, other], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def packed_line_amax_kernel(
    x, row_amax, column_amax, width, HEIGHT: tl.constexpr, WIDTH: tl.constexpr
):
    """Do what `line_amax_kernel` does on whole tiles of words that hold two bfloat16 each.

    Halves of a word are compared and passed between lanes together; widths are in words.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    down = tile // (width // WIDTH)
    across = tile % (width // WIDTH)
    row = tl.arange(0, HEIGHT)
    word = tl.arange(0, WIDTH)
    first = (down * HEIGHT).to(tl.int64) * width + across * WIDTH
    pair = tl.load(x + first + (row[:, None] * width + word[None, :])) & 0x7FFF7FFF
    # Both are found before either is written: the words then leave their registers early.
    if row_amax is not None:
        of_row = tl.reduce(pair, 1, _larger_pair)
        of_row = tl.maximum(of_row & 0x7FFF0000, of_row << 16)
    if column_amax is not None:
        of_word = tl.reduce(pair, 0, _larger_pair)
    if row_amax is not None:
        _raise(row_amax + down * HEIGHT + row, of_row, None)
    if column_amax is not None:
        column = column_amax + 2 * (across * WIDTH + word)
        _raise(column, of_word << 16, None)
        _raise(column + 1, of_word & 0x7FFF0000, None)


@triton.jit
def _tile(x, tile, height, width, EVEN: tl.constexpr):
    """Load a tile; return where it is, its rows and columns, what it has and which of it exists."""
    down = tile // tl.cdiv(width, _SIDE)
    across = tile % tl.cdiv(width, _SIDE)
    row = down * _SIDE + tl.arange(0, _SIDE)
    column = across * _SIDE + tl.arange(0, _SIDE)
    here = x + row.to(tl.int64)[:, None] * width + column[None, :]
    inside = (row < height)[:, None] & (column < width)[None, :]
    if EVEN:
        value = tl.load(here)
    else:
        value = tl.load(here, mask=inside, other=0)
    return down, across, row, column, value, inside


@triton.jit
def _put(out, row, column, width, value, inside, EVEN: tl.constexpr):
    """Store a tile of a matrix of some width."""
    here = out + row.to(tl.int64)[:, None] * width + column[None, :]
    if EVEN:
        tl.store(here, value)
    else:
        tl.store(here, value, mask=inside)


@triton.jit
def cast_tile_kernel(
    x,
    row_amax,
    column_amax,
    data,
    scale,
    turned,
    turned_scale,
    height,
    width,
    BY_LINE: tl.constexpr,
    EVEN: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Write one tile, once more transposed, or both, from one read."""
    down, across, row, column, value, inside = _tile(x, tl.program_id(0), height, width, EVEN)
    # All that is read is asked for before anything is written, and no branch divides the work: a
    # tile would be kept wide across one.
    if not BY_LINE:
        if row_amax is None:
            one_scale = tl.load(scale)
        else:
            one_scale = _scale_for(tl.load(row_amax), LARGEST, POWER_OF_TWO)
            if tl.program_id(0) == 0:
                tl.store(scale, one_scale)
    if BY_LINE and data is not None:
        row_most = tl.load(row_amax + row, mask=row < height, other=0.0)
    if BY_LINE and turned is not None:
        column_most = tl.load(column_amax + column, mask=column < width, other=0.0)
    if data is not None:
        if BY_LINE:
            row_scale = _scale_for(row_most, LARGEST, POWER_OF_TWO)
            tl.store(scale + row, row_scale, mask=row < tl.where(across == 0, height, 0))
            narrow = _narrow(value, row_scale[:, None], data.dtype.element_ty, LARGEST)
        else:
            narrow = _narrow(value, one_scale, data.dtype.element_ty, LARGEST)
        _put(data, row, column, width, narrow, inside, EVEN)
    if turned is not None:
        # Transposed before it is narrowed: shared memory turns 16-bit numbers as it loads them
        # (ldmatrix), while bytes would be fetched one by one.
        if BY_LINE:
            column_scale = _scale_for(column_most, LARGEST, POWER_OF_TWO)
            there = tl.where(down == 0, width, 0)
            tl.store(turned_scale + column, column_scale, mask=column < there)
            narrow = _narrow(
                tl.trans(value), column_scale[:, None], turned.dtype.element_ty, LARGEST
            )
        else:
            narrow = _narrow(tl.trans(value), one_scale, turned.dtype.element_ty, LARGEST)
        _put(turned, column, row, height, narrow, tl.trans(inside), EVEN)


@triton.jit
def cast_row_kernel(
    x, data, scale, width, LARGEST: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK: tl.constexpr
):
    """Hold a row in registers, find its scale and write it."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    far = row.to(tl.int64) * width + column
    value = tl.load(x + far, mask=column < width, other=0)
    most = _amax(tl.max(_magnitude(value), axis=0), value.dtype)
    row_scale = _scale_for(most, LARGEST, POWER_OF_TWO)
    tl.store(scale + row, row_scale)
    narrow = _narrow(value, row_scale, data.dtype.element_ty, LARGEST)
    tl.store(data + far, narrow, mask=column < width)


@triton.jit
def cast_block_kernel(
    x,
    data,
    scale,
    turned,
    turned_scale,
    height,
    width,
    scale_stride,
    turned_stride,
    SQUARE: tl.constexpr,
    EVEN: tl.constexpr,
    LARGEST: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    """Write one tile with its own scale, or with one for each line of it, in either direction."""
    down, across, row, column, value, inside = _tile(x, tl.program_id(0), height, width, EVEN)
    magnitude = _magnitude(value)
    if SQUARE:
        one_scale = _scale_for(_amax(tl.max(magnitude), value.dtype), LARGEST, POWER_OF_TWO)
    if data is not None:
        if SQUARE:
            tl.store(scale + down * scale_stride + across, one_scale)
            narrow = _narrow(value, one_scale, data.dtype.element_ty, LARGEST)
        else:
            row_scale = _scale_for(
                _amax(tl.max(magnitude, axis=1), value.dtype), LARGEST, POWER_OF_TWO
            )
            tl.store(scale + across * scale_stride + row, row_scale, mask=row < height)
            narrow = _narrow(value, row_scale[:, None], data.dtype.element_ty, LARGEST)
        _put(data, row, column, width, narrow, inside, EVEN)
    if turned is not None:
        if SQUARE:
            tl.store(turned_scale + across * turned_stride + down, one_scale)
            narrow = _narrow(tl.trans(value), one_scale, turned.dtype.element_ty, LARGEST)
        else:
            column_scale = _scale_for(
                _amax(tl.max(magnitude, axis=0), value.dtype), LARGEST, POWER_OF_TWO
            )
            here = turned_scale + down * turned_stride + column
            tl.store(here, column_scale, mask=column < width)
            # Read back in the order of the transposed tile: with scales at hand in the order of
            # the first, Triton would narrow in that order and transpose bytes.
            tl.debug_barrier()
            column_scale = tl.load(here, mask=column < width, other=1.0)
            narrow = _narrow(
                tl.trans(value), column_scale[:, None], turned.dtype.element_ty, LARGEST
            )
        _put(turned, column, row, height, narrow, tl.trans(inside), EVEN)
