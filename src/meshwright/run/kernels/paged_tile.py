"""What the kernels of paged attention share: where keys lie, how they are read, what scores become.

Keys and values are read in tiles. Eight-bit caches are read as pairs of neighbouring elements,
sixteen bits each, and taken apart in registers: the first of each pair multiplies the even columns
of the queries, the second the odd ones. So memory, shared memory and the matrix instructions see
16-bit tiles throughout; 8-bit values read column by column would go through shared memory byte by
byte. They are multiplied as float16, which holds every e4m3 value exactly.

Scores are in base 2: a score of s is worth 2ˢ.
"""

# Triton compiles these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

import os

from meshwright.run.kernels.language import tl, triton

NOTHING = tl.constexpr(-1e30)
"""The maximum of no scores: finite, so that differences of it are numbers."""
LOG2_E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
"""The interpreter knows no assembler, and takes pairs apart by arithmetic."""


@triton.jit
def first_key(place, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """Return the first position that a query at `place` sees."""
    first = place * 0
    if WINDOW:
        first = place - (WINDOW - 1)
    if CHUNK:
        first = tl.maximum(first, place // CHUNK * CHUNK)
    return tl.maximum(first, 0)


@triton.jit
def load_pages(table, start, key, length, BLOCK: tl.constexpr, TILE: tl.constexpr):
    """Load the pages of the tile of keys from `start` on: one, or each key's."""
    if BLOCK % TILE == 0:
        pages = tl.load(table + start // BLOCK, mask=start < length, other=0)
    else:
        place = start + key
        pages = tl.load(table + place // BLOCK, mask=place < length, other=0)
    return pages


@triton.jit
def load_tile(cache, offset, column, held, known, KEYS_LAST: tl.constexpr):
    """Load elements `column` of the keys at `offset`; 0 where they are not held or not known.

    KEYS_LAST puts keys along the last axis, and elements along the one before.
    """
    axis: tl.constexpr = len(offset.shape) - 1 if KEYS_LAST else len(offset.shape)
    here = cache + (tl.expand_dims(offset, axis) + column)
    mask = tl.expand_dims(held, axis)
    mask &= known if KEYS_LAST else _turned(known)
    return tl.load(here, mask=mask, other=0)


@triton.jit
def _turned(known):
    return tl.trans(known, (0, 2, 1) if len(known.shape) == 3 else (1, 0))


@triton.jit
def unpacked(tile, PAIRS: tl.constexpr):
    """Return both elements of each pair as float16; without PAIRS the tile, twice."""
    one = tile
    two = tile
    if PAIRS and INTERPRETED:
        one = _first(tile)
        two = _first(tile >> 8)
    elif PAIRS:
        # Of two pairs in a register: the first elements to the lower half, the second to the upper.
        one, two = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $2, 0, 0x3120; mov.b32 {a, b}, t;"
            " cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }",
            "=r,=r,r",
            args=[tile],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return one, two


@triton.jit
def _first(tile):
    # Exponents of e4m3 count from 7, those of float16 from 15; subnormals come out right as well.
    bits = ((tile & 0x80) << 8) | ((tile & 0x7F) << 7)
    return (bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(tl.float16)


@triton.jit
def multiply(left, right, total):
    """Multiply tiles and add to the total; in full precision where they are float32."""
    precision: tl.constexpr = "ieee" if left.dtype == tl.float32 else "tf32"
    return tl.dot(left, right, total, input_precision=precision)


@triton.jit
def shaped_scores(
    scores,
    key,
    place,
    slopes,
    scale,
    softcap,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Scale scores of queries (rows, at `place`) and keys, and hide what queries do not see."""
    scores *= scale
    if CAPPED:
        # tanh(x) = 1 - 2 / (e²ˣ + 1), which overflows to the right limits.
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / softcap)) + 1.0))
    scores *= LOG2_E
    key = tl.expand_dims(key, len(key.shape) - 1)
    if slopes is not None:
        scores += tl.expand_dims(slopes * LOG2_E, -1) * (key - place).to(tl.float32)
    seen = (key <= place) & (key >= first_key(place, WINDOW, CHUNK))
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def with_sink(most, sum_, sink):
    """Return what weighs the values found so far once a sink takes its part, and the new sum."""
    sink *= LOG2_E
    top = tl.maximum(most, sink)
    weight = tl.exp2(most - top)
    return weight, sum_ * weight + tl.exp2(sink - top)
