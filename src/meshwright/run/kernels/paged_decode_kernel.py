"""Kernels of decode attention over pages; `paged_decode` says what they compute and how.

A *unit* is one row's keys for one key/value head with the query heads that share it (those of all
its queries, where a row has several; a *line* each). Units stand in
one line, row after row and head after head; programs cut the line into equal shares
(`paged_plan_kernel`). What a program finds of a unit that others share goes to a slot of `parts`,
unnormalised; such units are put together by `join_parts`, or by the program that finished the last
part, as tickets tell.

Within a program WAYS warps may go separate ways: each takes its own keys of a tile, with a maximum
and a sum of its own, so that no warp waits for another before the unit ends.
"""

# Triton compiles these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0915, PLR0917

from meshwright.run.kernels.language import inputs_ready, tl, triton
from meshwright.run.kernels.paged_latent_kernel import attend_latents
from meshwright.run.kernels.paged_plan_kernel import (
    begin_grains,
    grain_tiles,
    row_tiles,
    share_of,
)
from meshwright.run.kernels.paged_tile import (
    NOTHING,
    attend_tiles,
    first_key,
    load_queries,
    store_rows,
    with_sink,
)


# Not compiled anew for a number of rows that happens to be 1 or a multiple of 16.
@triton.jit(do_not_specialize=["rows", "programs", "least", "table_row"])
def attend_shares(
    q,
    k_cache,
    v_cache,
    tables,
    lengths,
    plan,
    out,
    parts,
    stats,
    tickets,
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
    WAYS: tl.constexpr,
    PAIRS: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLITS: tl.constexpr,
    PACKED: tl.constexpr,
    QUERIES: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_COLUMNS: tl.constexpr,
    OUT_COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    PIECES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Attend over one share of all keys.

    With ROPE what is cached is latents of E elements, and so many more which are keys alone.
    """
    inputs_ready(EARLY)
    groups: tl.constexpr = (G * QUERIES + PACKED - 1) // PACKED
    units: tl.constexpr = K * groups
    program = tl.program_id(0)
    total = tl.load(plan + rows) * units
    share = share_of(total, programs, least)
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
        tiles = row_tiles(length, WINDOW, CHUNK, TILE, QUERIES)
        each = grain_tiles(tiles, SPLITS)
        start = first_key(length - QUERIES, WINDOW, CHUNK) // TILE
        ahead = begin_grains(SPLITS)
        begin = start + tl.maximum(first - ahead, 0) * each
        stop = start + tl.minimum(tl.maximum(first + taken - ahead, 0) * each, tiles)
        table = tables + row.to(tl.int64) * table_row
        token, head, place, inside = _lines(
            row, unit, tl.arange(0, M), length, K, G, PACKED, QUERIES
        )
        q_here = q + token * q_row + head * q_head
        if ROPE:
            one, two, most, sum_ = attend_latents(
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
                E, M, BLOCK, TILE, COLUMNS, WAYS, PAIRS, WINDOW, CHUNK, CAPPED, QUERIES,
            )  # fmt: skip
        if v_scale is not None:
            factor = tl.load(v_scale)
            one *= factor
            two *= factor
        if taken == grains:
            if sinks is not None:
                sink = tl.load(sinks + head, mask=inside, other=NOTHING).to(tl.float32)
                weight, sum_ = with_sink(most, sum_, sink)
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
            if tickets is not None:
                # Who writes the last part puts all together: no part is missing then. The barrier
                # has every thread's writes behind it before the ticket makes them known.
                tl.debug_barrier()
                lead = row * units + unit if SPLITS else (at - first) // share
                pieces = grains if SPLITS else (at - first + grains - 1) // share - lead + 1
                if tl.atomic_add(tickets + lead, 1, sem="acq_rel") == pieces - 1:
                    tl.store(tickets + lead, 0)
                    for number in range(0, PACKED, HEADS):
                        _join(
                            out, parts, stats, sinks, lead * (SPLITS or 2), pieces, row, unit,
                            number, K, G, E, PACKED, QUERIES, HEADS, OUT_COLUMNS, PIECES,
                            SPLITS,
                        )  # fmt: skip
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
    COLUMNS: tl.constexpr, WAYS: tl.constexpr, PAIRS: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, CAPPED: tl.constexpr, QUERIES: tl.constexpr,
):  # fmt: skip
    """Attend over tiles begin to end of a unit: weighted values in two halves, maximum, sum."""
    q_one, q_two, scale = load_queries(q, inside, scale, E, COLUMNS, PAIRS)
    if WAYS > 1 and slopes is not None:
        slopes = tl.broadcast_to(slopes[None], (WAYS, M))
    if WAYS > 1:
        q_one = tl.broadcast_to(q_one[None], (WAYS, M, COLUMNS))
        q_two = tl.broadcast_to(q_two[None], (WAYS, M, COLUMNS))
        one = tl.zeros((WAYS, M, COLUMNS), tl.float32)
        most = tl.full((WAYS, M), NOTHING, tl.float32)
        sums = tl.zeros((WAYS, M, TILE // WAYS), tl.float32)
    else:
        one = tl.zeros((M, COLUMNS), tl.float32)
        most = tl.full((M,), NOTHING, tl.float32)
        sums = tl.zeros((M, TILE), tl.float32)
    if WAYS > 1 and QUERIES > 1:
        place = place[None]
    two = one if PAIRS else 0.0
    one, two, most, sums = attend_tiles(
        q_one, q_two, one, two, most, sums, k_cache, v_cache, table, place,
        length, slopes, scale, softcap, begin, end, page_stride, token_stride,
        E // 2 if PAIRS else E, COLUMNS, BLOCK, TILE, WAYS, PAIRS, WINDOW, CHUNK, CAPPED, True,
    )  # fmt: skip
    sum_ = tl.sum(sums, len(sums.shape) - 1)
    if WAYS > 1:
        top = tl.max(most, 0)
        weight = tl.exp2(most - top[None])
        sum_ = tl.sum(sum_ * weight, 0)
        one = _added(one * weight[:, :, None])
        if PAIRS:
            two = _added(two * weight[:, :, None])
        most = top
    if not PAIRS:
        two = one
    return one, two, most, sum_


@triton.jit
def _added(ways):
    """Add up what the ways found: halves at a time, which takes fewer exchanges than a sum."""
    left = tl.permute(ways, (1, 2, 0))
    if ways.shape[0] >= 8:
        left = _halved(left)
    if ways.shape[0] >= 4:
        left = _halved(left)
    return tl.reshape(_halved(left), (ways.shape[1], ways.shape[2]))


@triton.jit
def _halved(parts):
    pairs = tl.reshape(parts, (parts.shape[0], parts.shape[1], parts.shape[2] // 2, 2))
    one, two = tl.split(pairs)
    return one + two


@triton.jit(do_not_specialize=["rows", "programs", "least"])
def join_parts(
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
    EARLY: tl.constexpr,
):
    """Put together one query head of one unit that several programs shared.

    Without SPLITS of the unit, if any, that begins in a program's share and goes on beyond; with
    SPLITS of any unit. Parts are added in the order of their keys.
    """
    inputs_ready(EARLY)
    groups: tl.constexpr = (G * QUERIES + PACKED - 1) // PACKED
    units: tl.constexpr = K * groups
    program = tl.program_id(0)
    total = tl.load(plan + rows) * units
    share = share_of(total, programs, least)
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
        _join(
            out, parts, stats, sinks, base, pieces, row, unit, tl.program_id(1),
            K, G, E, PACKED, QUERIES, 1, COLUMNS, PIECES, SPLITS,
        )  # fmt: skip


@triton.jit
def _join(
    out, parts, stats, sinks, base, pieces, row, unit, lead,
    K: tl.constexpr, G: tl.constexpr, E: tl.constexpr, PACKED: tl.constexpr,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr, PIECES: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Put together HEADS lines of a unit, from its `lead` on, in the order of keys."""
    number = lead + tl.arange(0, HEADS)
    token, head, _, real = _lines(row, unit, number, 0, K, G, PACKED, QUERIES)
    column = tl.arange(0, COLUMNS)
    most = tl.full((PIECES, HEADS), NOTHING, tl.float32)
    sums = tl.zeros((PIECES, HEADS), tl.float32)
    found = tl.zeros((PIECES, HEADS, COLUMNS), tl.float32)
    for start in range(0, pieces, PIECES):
        piece = start + tl.arange(0, PIECES)
        slot = base + (piece if SPLITS else tl.where(piece == 0, 1, 2 * piece))
        place = slot.to(tl.int64)[:, None] * PACKED + number[None, :]
        there = (piece < pieces)[:, None] & real[None, :]
        # Past the first-level cache, which may still hold what another call left there.
        top = tl.load(stats + 2 * place, mask=there, other=NOTHING, cache_modifier=".cg")
        sum_ = tl.load(stats + 2 * place + 1, mask=there, other=0.0, cache_modifier=".cg")
        here = parts + place[:, :, None] * E + column[None, None, :]
        within = there[:, :, None] & (column < E)[None, None, :]
        part = tl.load(here, mask=within, other=0.0, cache_modifier=".cg")
        now = tl.maximum(most, top)
        old = tl.exp2(most - now)
        new = tl.exp2(top - now)
        sums = sums * old + sum_ * new
        found = found * old[:, :, None] + part * new[:, :, None]
        most = now
    now = tl.max(most, 0)
    weight = tl.exp2(most - now[None, :])
    sum_ = tl.sum(sums * weight, 0)
    whole = tl.sum(found * weight[:, :, None], 0)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=real, other=NOTHING).to(tl.float32)
        factor, sum_ = with_sink(now, sum_, sink)
        whole *= factor[:, None]
    whole /= tl.where(sum_ > 0, sum_, 1.0)[:, None]
    store_rows(out + (token * (K * G) + head) * E, whole, whole, real, E, COLUMNS, False)
