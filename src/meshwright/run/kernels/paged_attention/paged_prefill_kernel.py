"""The kernel of prefill attention over pages; `paged_prefill` says what it computes.

A program takes neighbouring queries of one row with all query heads that share a key/value head:
line i of its tile is query i // PACKED, head i % PACKED. Keys that all of its queries see come
first and are read without a mask.
"""

# Triton compiles these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0915, PLR0917

from meshwright.run.kernels.paged_attention.kv_tile import (
    MASKED_SCORE,
    attend_tiles,
    find_first_visible_key,
    load_queries,
    merge_attention_sink,
    store_rows,
)
from meshwright.run.kernels.triton_compat import tl, triton


@triton.jit(do_not_specialize=["number", "left", "skip", "table_row"])
def prefill_kernel(
    q,
    k_cache,
    v_cache,
    tables,
    lengths,
    starts,
    out,
    sinks,
    alibi,
    k_scale,
    v_scale,
    scale,
    softcap,
    number,
    left,
    skip,
    split,
    q_token,
    q_head,
    out_token,
    page_stride,
    token_stride,
    head_stride,
    table_row,
    K: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """Attend with queries of the `left` rows behind the first `skip` ones; the rest get zeros.

    `split`, where there is one, holds both numbers. There may then be more blocks of queries than
    programs, which take one after the other.
    """
    if k_scale is not None:
        scale *= tl.load(k_scale)
    programs = tl.num_programs(0)
    if split is None:
        # The last queries of a row see the most keys: they go first.
        _attend_block(
            q, k_cache, v_cache, tables, lengths, starts, out, sinks, alibi, v_scale, scale,
            softcap, programs - 1 - tl.program_id(0), number, left, skip, q_token, q_head,
            out_token, page_stride, token_stride, head_stride, table_row,
            K, G, E, M, PACKED, BLOCK, TILE, COLUMNS, ROWS, PAIRS, WINDOW, CHUNK, CAPPED,
        )  # fmt: skip
    else:
        skip = tl.load(split)
        left = tl.load(split + 1)
        blocks = (number - tl.load(starts + skip)) // (M // PACKED) + left + 1
        block = blocks - 1 - tl.program_id(0)
        while block >= 0:
            _attend_block(
                q, k_cache, v_cache, tables, lengths, starts, out, sinks, alibi, v_scale, scale,
                softcap, block, number, left, skip, q_token, q_head, out_token, page_stride,
                token_stride, head_stride, table_row,
                K, G, E, M, PACKED, BLOCK, TILE, COLUMNS, ROWS, PAIRS, WINDOW, CHUNK, CAPPED,
            )  # fmt: skip
            block -= programs


@triton.jit
def _attend_block(
    q, k_cache, v_cache, tables, lengths, starts, out, sinks, alibi, v_scale, scale, softcap,
    block, number, left, skip, q_token, q_head, out_token, page_stride, token_stride, head_stride,
    table_row,
    K: tl.constexpr, G: tl.constexpr, E: tl.constexpr, M: tl.constexpr, PACKED: tl.constexpr,
    BLOCK: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    PAIRS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """Attend with the queries of one block, all heads that share a key/value head together."""
    queries: tl.constexpr = M // PACKED
    unit = tl.program_id(1)
    row, first, many, length = _block_of(block, starts, lengths, number, left, skip, queries, ROWS)
    if first < many:
        line = tl.arange(0, M)
        query = first + line // PACKED
        member = unit // K * PACKED + line % PACKED
        inside = (line < queries * PACKED) & (query < many) & (member < G)
        kv_head = unit % K
        head = kv_head * G + member
        token = (tl.load(starts + row) + query).to(tl.int64)
        place = length - many + query
        slopes = None
        if alibi is not None:
            slopes = tl.load(alibi + head, mask=inside, other=0.0).to(tl.float32)
        q_here = q + token * q_token + head * q_head
        q_one, q_two, scale = load_queries(q_here, inside, scale, E, COLUMNS, PAIRS)
        one = tl.zeros((M, COLUMNS), tl.float32)
        two = one if PAIRS else 0.0
        most = tl.full((M,), MASKED_SCORE, tl.float32)
        sums = tl.zeros((M,), tl.float32)
        start = kv_head.to(tl.int64) * head_stride
        table = tables + row.to(tl.int64) * table_row
        lowest = length - many + first
        begin = find_first_visible_key(lowest, WINDOW, CHUNK) // TILE
        end = tl.cdiv(tl.minimum(lowest + queries, length), TILE)
        width: tl.constexpr = E // 2 if PAIRS else E
        if not (WINDOW or CHUNK):
            whole = tl.maximum(lowest + 1, 0) // TILE
            one, two, most, sums = attend_tiles(
                q_one, q_two, one, two, most, sums, k_cache + start, v_cache + start, table,
                place[:, None], length, slopes, scale, softcap, begin, whole, page_stride,
                token_stride, width, COLUMNS, BLOCK, TILE, PAIRS, WINDOW, CHUNK, CAPPED, False,
            )  # fmt: skip
            begin = whole
        one, two, most, sums = attend_tiles(
            q_one, q_two, one, two, most, sums, k_cache + start, v_cache + start, table,
            place[:, None], length, slopes, scale, softcap, begin, end, page_stride,
            token_stride, width, COLUMNS, BLOCK, TILE, PAIRS, WINDOW, CHUNK, CAPPED, True,
        )  # fmt: skip
        factor = tl.full((M,), 1.0, tl.float32)
        if sinks is not None:
            sink = tl.load(sinks + head, mask=inside, other=MASKED_SCORE).to(tl.float32)
            factor, sums = merge_attention_sink(most, sums, sink)
        factor /= tl.where(sums > 0, sums, 1.0)
        if v_scale is not None:
            factor *= tl.load(v_scale)
        one *= factor[:, None]
        if PAIRS:
            two *= factor[:, None]
        else:
            two = one
        store_rows(out + token * out_token + head * E, one, two, inside, E, COLUMNS, PAIRS)


@triton.jit
def _block_of(
    block, starts, lengths, number, left, skip, QUERIES: tl.constexpr, ROWS: tl.constexpr
):
    """Return the row of a block of queries, its first query, and the row's queries and keys.

    With rows and queries counted behind those that are skipped, row r's blocks are numbered from
    start // QUERIES + r on, which leaves room for all without a count; one more row holds the
    tokens behind all others, and has no keys.
    """
    here = starts + skip
    before = tl.load(here)
    row = tl.arange(0, ROWS)
    start = tl.load(here + row, mask=row <= left, other=0) - before
    begun = (start // QUERIES + row <= block) & (row <= left)
    row = tl.sum(begun.to(tl.int32), 0) - 1
    start = tl.load(here + row)
    end = tl.load(here + row + 1, mask=row < left, other=number)
    length = tl.load(lengths + skip + row, mask=row < left, other=0)
    first = (block - (start - before) // QUERIES - row) * QUERIES
    return skip + row, first, end - start, length
