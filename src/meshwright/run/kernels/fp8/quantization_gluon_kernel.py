"""The kernels that write whole tiles of bfloat16 in fp8 both ways, with every layout said (Gluon).

Triton would find the largest magnitudes of columns where a tile lies, across lanes and warps, and
scales would reach the transposed tile through memory. Here a tile is turned once, while its numbers
have 16 bits (ldmatrix turns those), and either order finds its own magnitudes along its rows: 16
numbers in a thread, eight lanes to a line of fp8. `quantization_kernel` does all other matrices.
"""

# Triton compiles these functions itself: their arguments are its own values, not Python's.
# mypy: ignore-errors
# ruff: noqa: PLR0917

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan

from meshwright.run.kernels.fp8.quantization_kernel import BLOCK_SIDE, MIN_AMAX

_SIDE = gl.constexpr(BLOCK_SIDE)
_LEAST = gl.constexpr(MIN_AMAX)
_ALL = gl.constexpr(PropagateNan.ALL)


@gluon.jit
def _scale_for(amax, LARGEST: gl.constexpr, POWER_OF_TWO: gl.constexpr):
    """Return the scale that takes the format's largest number to `amax`, or the next power of 2."""
    scale = gl.maximum(amax, _LEAST, propagate_nan=_ALL) * (1.0 / LARGEST)
    if POWER_OF_TWO:
        bits = scale.to(gl.int32, bitcast=True)
        even = ((bits + 0x007FFFFF) & 0x7F800000).to(gl.float32, bitcast=True)
        scale = gl.where(bits > 0x7F800000, scale, even)  # NaN stays
    return scale


@gluon.jit
def _amax_of_rows(value):
    """Compare magnitudes as integers, which are ordered alike, NaN above all."""
    most = gl.max(value.to(gl.int16, bitcast=True) & 0x7FFF, axis=1)
    return (most.to(gl.int32) << 16).to(gl.float32, bitcast=True)


@gluon.jit
def _far(stride):
    """Say which lines of a tile a thread has, and how far each of its numbers is from the first."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    line = gl.arange(0, _SIDE, layout=gl.SliceLayout(1, LAYOUT))
    place = gl.arange(0, _SIDE, layout=gl.SliceLayout(0, LAYOUT))
    return line, line[:, None] * stride + place[None, :]


@gluon.jit
def _turn(value):
    """Transpose a tile and lay it out as it was."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    return gl.convert_layout(value.trans(), LAYOUT)


@gluon.jit
def _put(out, far, value, scale):
    """Divide rows by their scales, round, saturating, and store."""
    narrow = value.to(gl.float32) * (1.0 / scale)[:, None]
    gl.store(out + far, narrow.to(out.dtype.element_ty))


@gluon.jit
def cast_tile_gluon_kernel(
    x,
    row_amax,
    column_amax,
    data,
    scale,
    turned,
    turned_scale,
    height,
    width,
    LARGEST: gl.constexpr,
    POWER_OF_TWO: gl.constexpr,
):
    """Write one tile with the scales of its rows, and transposed with those of its columns."""
    down = gl.program_id(0) // (width // _SIDE)
    across = gl.program_id(0) % (width // _SIDE)
    first = (down * _SIDE).to(gl.int64) * width + across * _SIDE
    line, far = _far(width)
    value = gl.load(x + first + far)
    row = down * _SIDE + line
    column = across * _SIDE + line
    row_most = gl.load(row_amax + row)
    column_most = gl.load(column_amax + column)
    row_scale = _scale_for(row_most, LARGEST, POWER_OF_TWO)
    gl.store(scale + row, row_scale, mask=line < gl.where(across == 0, _SIDE, 0))
    _put(data + first, far, value, row_scale)
    column_scale = _scale_for(column_most, LARGEST, POWER_OF_TWO)
    gl.store(turned_scale + column, column_scale, mask=line < gl.where(down == 0, _SIDE, 0))
    there = (across * _SIDE).to(gl.int64) * height + down * _SIDE
    _, far = _far(height)
    _put(turned + there, far, _turn(value), column_scale)


@gluon.jit
def cast_tile_lines_gluon_kernel(
    x,
    data,
    scale,
    turned,
    turned_scale,
    height,
    width,
    scale_stride,
    turned_stride,
    LARGEST: gl.constexpr,
    POWER_OF_TWO: gl.constexpr,
):
    """Write one tile with a scale for each of its rows, transposed for each of its columns."""
    down = gl.program_id(0) // (width // _SIDE)
    across = gl.program_id(0) % (width // _SIDE)
    first = (down * _SIDE).to(gl.int64) * width + across * _SIDE
    line, far = _far(width)
    value = gl.load(x + first + far)
    row_scale = _scale_for(_amax_of_rows(value), LARGEST, POWER_OF_TWO)
    gl.store(scale + across * scale_stride + down * _SIDE + line, row_scale)
    _put(data + first, far, value, row_scale)
    other = _turn(value)
    column_scale = _scale_for(_amax_of_rows(other), LARGEST, POWER_OF_TWO)
    gl.store(turned_scale + down * turned_stride + across * _SIDE + line, column_scale)
    there = (across * _SIDE).to(gl.int64) * height + down * _SIDE
    _, far = _far(height)
    _put(turned + there, far, other, column_scale)
