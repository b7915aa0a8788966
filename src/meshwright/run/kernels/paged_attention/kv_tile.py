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

from meshwright.run.kernels.triton_compat import INTERPRETED, tl, triton

MASKED_SCORE = tl.constexpr(-1e30)
"""The maximum of no scores: finite, so that differences of it are numbers."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def find_first_visible_key(place, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
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
def load_tile(
    cache, offset, held, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr
):
    """Load WIDTH elements of the keys at `offset`; 0 beyond, and where MASKED and not held."""
    column = tl.arange(0, COLUMNS)[None, :]
    here = cache + (offset[:, None] + column)
    if MASKED and WIDTH < COLUMNS:
        tile = tl.load(here, mask=held[:, None] & (column < WIDTH), other=0)
    elif MASKED:
        tile = tl.load(here, mask=held[:, None], other=0)
    elif WIDTH < COLUMNS:
        tile = tl.load(here, mask=tl.broadcast_to(column < WIDTH, here.shape), other=0)
    else:
        tile = tl.load(here)
    return tile


@triton.jit
def unpack_pairs(tile, PAIRS: tl.constexpr):
    """Return both elements of each pair as float16; without PAIRS the tile, twice."""
    one = tile
    two = tile
    if PAIRS and INTERPRETED:  # which knows no assembler: by arithmetic
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
def tile_dot(left, right, total):
    """Multiply tiles and add to the total; float32 stays float32, or nearly.

    Sixteen rows, those of a decode, wait for memory anyway and are multiplied as they are, in half
    the registers. More of them go to tensor cores in three products, which keep 22 of the 24 bits:
    multiplied as they are, they would not fit into registers.
    """
    few: tl.constexpr = left.shape[0] <= 16
    whole: tl.constexpr = "ieee" if few else "tf32x3"
    precision: tl.constexpr = whole if left.dtype == tl.float32 else "tf32"
    return tl.dot(left, right, total, input_precision=precision)


@triton.jit
def modify_scores(
    scores,
    key,
    place,
    slopes,
    scale,
    softcap,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Scale scores of queries (rows, at `place`) and keys, and hide what queries do not see.

    Without MASKED they see all.
    """
    scores *= scale * LOG2_E
    if CAPPED:
        # tanh(x) = 1 - 2 / (e²ˣ + 1), which overflows to the right limits.
        scores = 1.0 - 2.0 / (tl.exp2(scores * (2.0 / softcap)) + 1.0)
        scores *= softcap * LOG2_E
    key = key[None, :]
    if slopes is not None:
        scores += (slopes * LOG2_E)[:, None] * (key - place).to(tl.float32)
    if MASKED:
        seen = (key <= place) & (key >= find_first_visible_key(place, WINDOW, CHUNK))
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def attend_tiles(
    q_one, q_two, one, two, most, sums,
    k_cache, v_cache, table, place, length, slopes, scale, softcap, begin, end,
    page_stride, token_stride,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    PAIRS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Go on attending over tiles begin to end: weighted values, maximum and sum of weights.

    Sums may be kept per key of a tile, to be added up in the end. Without MASKED all keys are seen.
    """
    key = tl.arange(0, TILE)
    pages = load_pages(table, begin * TILE, key, length, BLOCK, TILE)
    for tile in tl.range(begin, end):
        here = tile * TILE + key
        page = pages.to(tl.int64) * page_stride
        # The next tile's pages are asked for one tile ahead: they say where its keys lie.
        pages = load_pages(table, (tile + 1) * TILE, key, length, BLOCK, TILE)
        if BLOCK % TILE == 0:
            page += tile * TILE % BLOCK * token_stride
            k_tile = k_cache + page
            v_tile = v_cache + page
            offset = key * token_stride
        else:
            k_tile = k_cache
            v_tile = v_cache
            offset = page + here % BLOCK * token_stride
        held = here < length
        keys = load_tile(k_tile, offset, held, WIDTH, COLUMNS, MASKED)
        k_one, k_two = unpack_pairs(keys, PAIRS)
        scores = tile_dot(q_one, tl.trans(k_one), None)
        if PAIRS:
            scores = tile_dot(q_two, tl.trans(k_two), scores)
        scores = modify_scores(
            scores, here, place, slopes, scale, softcap, WINDOW, CHUNK, CAPPED, MASKED
        )
        now = tl.maximum(most, tl.max(scores, 1))
        weight = tl.exp2(most - now)
        shares = tl.exp2(scores - now[:, None])
        most = now
        if len(sums.shape) == 1:
            sums = sums * weight + tl.sum(shares, 1)
        else:
            sums = sums * weight[:, None] + shares
        weight = weight[:, None]
        values = load_tile(v_tile, offset, held, WIDTH, COLUMNS, MASKED)
        v_one, v_two = unpack_pairs(values, PAIRS)
        shares = shares.to(v_one.dtype)
        one = tile_dot(shares, v_one, one * weight)
        if PAIRS:
            two = tile_dot(shares, v_two, two * weight)
    return one, two, most, sums


@triton.jit
def load_queries(here, inside, scale, E: tl.constexpr, COLUMNS: tl.constexpr, PAIRS: tl.constexpr):
    """Load queries from where each begins: all elements twice, or the even and the odd ones.

    Also returns what is left to scale scores by: queries in pairs are scaled here, before they
    become float16, which ends at 65,504.
    """
    step: tl.constexpr = 2 if PAIRS else 1
    column = tl.arange(0, COLUMNS)
    within = inside[:, None] & (column < E // step)[None, :]
    here = here[:, None] + step * column[None, :]
    one = tl.load(here, mask=within, other=0.0)
    two = one
    if PAIRS:
        two = tl.load(here + 1, mask=within, other=0.0)
        one = (one * scale).to(tl.float16)
        two = (two * scale).to(tl.float16)
        scale = 1.0
    return one, two, scale


@triton.jit
def store_rows(out, one, two, inside, E: tl.constexpr, COLUMNS: tl.constexpr, PAIRS: tl.constexpr):
    """Store rows to where they begin: one, or the even elements of one and the odd of two."""
    column = tl.arange(0, COLUMNS)
    if PAIRS:
        column = tl.arange(0, 2 * COLUMNS)
        one = tl.reshape(tl.join(one, two), (one.shape[0], 2 * COLUMNS))
    within = inside[:, None] & (column < E)[None, :]
    tl.store(out[:, None] + column[None, :], one.to(out.dtype.element_ty), mask=within)


@triton.jit
def merge_attention_sink(most, sum_, sink):
    """Return what weighs the values found so far once a sink takes its part, and the new sum."""
    sink *= LOG2_E
    top = tl.maximum(most, sink)
    weight = tl.exp2(most - top)
    return weight, sum_ * weight + tl.exp2(sink - top)
