"""Kernels of decode attention over pages; `paged_decode` says what they compute and how.

A *unit* is one row's keys for one key/value head with the query heads that share it (those of all
its queries, where a row has several; a *line* each). Units stand in
one line, row after row and head after head; programs cut the line into equal shares
(`split_kv_kernel`). What a program finds of a unit that others share goes to a slot of `parts`,
unnormalised; such units are put together by `merge_splits_kernel`.
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
from meshwright.run.kernels.paged_attention.mla_decode_kernel import attend_latent_tiles
from meshwright.run.kernels.paged_attention.split_kv_kernel import (
    count_grains_per_program,
    count_leading_grains,
    count_row_tiles,
    count_tiles_per_grain,
)
from meshwright.run.kernels.triton_compat import tl, triton, wait_for_inputs


# Not compiled anew for a number of rows that happens to be 1 or a multiple of 16.
@triton.jit(do_not_specialize=["rows", "programs", "least", "table_row"])
def decode_kernel(
    q,
    k_cache,
    v_cache,
    tables,
    lengths,
    plan,
    out,
    parts,
    stats,
    sinks,
    alibi,
    k_scale,
    v_scale,
    scale,
    softcap,
    rows,
    programs,
    least,
    q_row,
    q_head,
    page_stride,
    token_stride,
    head_stride,
    table_row,
    K: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLITS: tl.constexpr,
    PACKED: tl.constexpr,
    QUERIES: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend over one share of all keys.

    With ROPE what is cached is latents of E elements, and so many more which are keys alone.
    """
    wait_for_inputs(PDL)
    groups: tl.constexpr = (G * QUERIES + PACKED - 1) // PACKED
    units: tl.constexpr = K * groups
    program = tl.program_id(0)
    total = tl.load(plan + rows) * units
    share = count_grains_per_program(total, programs, least)
    at = program * share
    end = tl.minimum(at + share, total)
    row = tl.load(plan + 1 + rows + program)
    if k_scale is not None:
        scale *= tl.load(k_scale)
    while at < end:
        before = tl.load(plan + row)
        grains = tl.load(plan + row + 1) - before
        length = tl.load(lengths + row)
        passed = at - before * units
        unit = passed // grains
        first = passed - unit * grains
        taken = 1 if SPLITS else tl.minimum(grains - first, end - at)
        tiles = count_row_tiles(length, WINDOW, CHUNK, TILE, QUERIES)
        each = count_tiles_per_grain(tiles, SPLITS)
        start = find_first_visible_key(length - QUERIES, WINDOW, CHUNK) // TILE
        ahead = count_leading_grains(SPLITS)
        begin = start + tl.maximum(first - ahead, 0) * each
        stop = start + tl.minimum(tl.maximum(first + taken - ahead, 0) * each, tiles)
        table = tables + row.to(tl.int64) * table_row
        token, head, place, inside = _lines(
            row, unit, tl.arange(0, M), length, K, G, PACKED, QUERIES
        )
        q_here = q + token * q_row + head * q_head
        if ROPE:
            one, two, most, sum_ = attend_latent_tiles(
                q_here, k_cache, table, inside, place, length, scale, begin, stop, page_stride,
                token_stride, E, ROPE, M, COLUMNS, ROPE_COLUMNS, BLOCK, TILE, PAIRS,
            )  # fmt: skip
        else:
            slopes = None
            if alibi is not None:
                slopes = tl.load(alibi + head, mask=inside, other=0.0).to(tl.float32)
            away = (unit % K).to(tl.int64) * head_stride
            one, two, most, sum_ = _attend_unit(
                q_here, k_cache + away, v_cache + away, table, inside, slopes, place, length,
                scale, softcap, begin, stop, page_stride, token_stride,
                E, M, BLOCK, TILE, COLUMNS, PAIRS, WINDOW, CHUNK, CAPPED,
            )  # fmt: skip
        if v_scale is not None:
            factor = tl.load(v_scale)
            one *= factor
            two *= factor
        if taken == grains:
            if sinks is not None:
                sink = tl.load(sinks + head, mask=inside, other=MASKED_SCORE).to(tl.float32)
                weight, sum_ = merge_attention_sink(most, sum_, sink)
                one *= weight[:, None]
                two *= weight[:, None]
            inverse = 1.0 / tl.where(sum_ > 0, sum_, 1.0)
            here = out + (token * (K * G) + head) * E
            store_rows(
                here, one * inverse[:, None], two * inverse[:, None], inside, E, COLUMNS, PAIRS
            )
        else:
            slot = (row * units + unit) * SPLITS + first if SPLITS else 2 * program + (first == 0)
            room = slot.to(tl.int64) * PACKED + tl.arange(0, M)
            store_rows(parts + room * E, one, two, inside, E, COLUMNS, PAIRS)
            tl.store(stats + 2 * room, most, mask=inside)
            tl.store(stats + 2 * room + 1, sum_, mask=inside)
        at += taken
        row += (at - before * units >= grains * units).to(tl.int32)


@triton.jit
def _lines(
    row, unit, number, length,
    K: tl.constexpr, G: tl.constexpr, PACKED: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Return token, query head and place of the lines of a unit, and which lines there are.

    Lines are the queries of a row one after the other, with the heads that share keys for each.
    """
    line = unit // K * PACKED + number
    inside = (number < PACKED) & (line < G * QUERIES)
    if QUERIES == 1:
        token = row.to(tl.int64)
        place = length - 1
        head = unit % K * G + line
    else:
        token = (row * QUERIES + line // G).to(tl.int64)
        place = (length - QUERIES + line // G)[:, None]
        head = unit % K * G + line % G
    return token, head, place, inside


@triton.jit
def _attend_unit(
    q, k_cache, v_cache, table, inside, slopes, place, length, scale, softcap, begin, end,
    page_stride, token_stride,
    E: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, PAIRS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Attend over tiles begin to end of a unit: weighted values in two halves, maximum, sum."""
    q_one, q_two, scale = load_queries(q, inside, scale, E, COLUMNS, PAIRS)
    one = tl.zeros((M, COLUMNS), tl.float32)
    two = one if PAIRS else 0.0
    most = tl.full((M,), MASKED_SCORE, tl.float32)
    sums = tl.zeros((M, TILE), tl.float32)
    one, two, most, sums = attend_tiles(
        q_one, q_two, one, two, most, sums, k_cache, v_cache, table, place,
        length, slopes, scale, softcap, begin, end, page_stride, token_stride,
        E // 2 if PAIRS else E, COLUMNS, BLOCK, TILE, PAIRS, WINDOW, CHUNK, CAPPED, True,
    )  # fmt: skip
    if not PAIRS:
        two = one
    return one, two, most, tl.sum(sums, 1)


@triton.jit(do_not_specialize=["rows", "programs", "least"])
def merge_splits_kernel(
    plan,
    out,
    parts,
    stats,
    sinks,
    rows,
    programs,
    least,
    K: tl.constexpr,
    G: tl.constexpr,
    E: tl.constexpr,
    PACKED: tl.constexpr,
    QUERIES: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECES: tl.constexpr,
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Put together one query head of one unit that several programs shared.

    Without SPLITS of the unit, if any, that begins in a program's share and goes on beyond; with
    SPLITS of any unit. Parts are added in the order of their keys.
    """
    wait_for_inputs(PDL)
    groups: tl.constexpr = (G * QUERIES + PACKED - 1) // PACKED
    units: tl.constexpr = K * groups
    program = tl.program_id(0)
    total = tl.load(plan + rows) * units
    share = count_grains_per_program(total, programs, least)
    if SPLITS:
        row = program // units
        unit = program % units
        grains = tl.load(plan + row + 1) - tl.load(plan + row)
        pieces = grains
        base = program * SPLITS
    else:
        row = tl.load(plan + 2 + rows + program)
        end = (program + 1) * share
        pieces = 1
        unit = 0
        base = 2 * program
        if end < total:
            before = tl.load(plan + row)
            grains = tl.load(plan + row + 1) - before
            inside = end - before * units
            unit = inside // grains
            begin = end - (inside - unit * grains)
            if (begin < end) & (begin >= end - share):
                pieces = (begin + grains - 1) // share - program + 1
    if pieces > 1:
        number = tl.program_id(1) + tl.arange(0, 1)
        token, head, _, real = _lines(row, unit, number, 0, K, G, PACKED, QUERIES)
        column = tl.arange(0, COLUMNS)
        within = real[:, None] & (column < E)[None, :]
        most = tl.full((PIECES,), MASKED_SCORE, tl.float32)
        sums = tl.zeros((PIECES,), tl.float32)
        found = tl.zeros((PIECES, COLUMNS), tl.float32)
        for start in range(0, pieces, PIECES):
            piece = start + tl.arange(0, PIECES)
            slot = base + (piece if SPLITS else tl.where(piece == 0, 1, 2 * piece))
            place = slot.to(tl.int64) * PACKED + number
            there = (piece < pieces) & real
            top = tl.load(stats + 2 * place, mask=there, other=MASKED_SCORE)
            sum_ = tl.load(stats + 2 * place + 1, mask=there, other=0.0)
            here = parts + place[:, None] * E + column[None, :]
            part = tl.load(here, mask=there[:, None] & within, other=0.0)
            now = tl.maximum(most, top)
            old = tl.exp2(most - now)
            new = tl.exp2(top - now)
            sums = sums * old + sum_ * new
            found = found * old[:, None] + part * new[:, None]
            most = now
        now = tl.max(most, 0)
        weight = tl.exp2(most - now)
        sum_ = tl.sum(sums * weight, 0)
        whole = tl.sum(found * weight[:, None], 0)
        if sinks is not None:
            sink = tl.max(tl.load(sinks + head, mask=real, other=MASKED_SCORE).to(tl.float32), 0)
            factor, sum_ = merge_attention_sink(now, sum_, sink)
            whole *= factor
        whole /= tl.where(sum_ > 0, sum_, 1.0)
        here = out + (token * (K * G) + head)[:, None] * E + column[None, :]
        tl.store(here, whole[None, :].to(out.dtype.element_ty), mask=within)
