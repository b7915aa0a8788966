"""How keys of all rows are shared out among the programs of decode attention, found on the device.

A row is as many *grains* long as it has tiles of keys that are seen, and one more: what it costs to
begin with a row and to end it, about as long as a tile takes. (Without it, who had short rows was
done last: 256 rows of 100 to 1,600 keys took 295 µs of an H200, at 63 % of its bandwidth.) Or,
where its own length alone must say how it is cut, a few grains of many tiles. Every head has the
same grains. A program's share is so many of them in a line.
"""

# Triton compiles these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

from meshwright.run.kernels.paged_attention.kv_tile import find_first_visible_key
from meshwright.run.kernels.triton_compat import tl, triton


# Not compiled anew for a number of rows that happens to be 1 or a multiple of 16.
@triton.jit(do_not_specialize=["rows", "programs", "units", "least"])
def split_kv_kernel(
    lengths,
    plan,
    live,
    rows,
    programs,
    units,
    least,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    QUERIES: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """Count grains before each row, and find the row in which each program's share begins.

    `plan` gets rows + 1 counts (of one head), then programs + 1 rows. Each program here finds the
    rows of PROGRAMS shares. `live`, where there is one, holds how many of the rows there are: those
    behind have no grains, so that no program comes to them.
    """
    row = tl.arange(0, ROWS)
    length = tl.load(lengths + row, mask=row < rows, other=0)
    tiles = count_row_tiles(length, WINDOW, CHUNK, TILE, QUERIES)
    grains = tl.cdiv(tiles, count_tiles_per_grain(tiles, SPLITS)) + count_leading_grains(SPLITS)
    there = row < rows
    if live is not None:
        there = there & (row < tl.load(live))
    through = tl.cumsum(tl.where(there, grains, 0), 0)
    total = tl.max(through, 0) * units
    if tl.program_id(0) == 0:
        tl.store(plan + 1 + row, through, mask=row < rows)
        tl.store(plan, 0)
    share = count_grains_per_program(total, programs, least)
    program = tl.program_id(0) * PROGRAMS + tl.arange(0, PROGRAMS)
    passed = (through * units)[None, :] <= (program * share)[:, None]
    first = tl.sum((passed & (row < rows)[None, :]).to(tl.int32), 1)
    tl.store(plan + 1 + rows + program, first, mask=program <= programs)


@triton.jit
def count_row_tiles(
    length, WINDOW: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, QUERIES: tl.constexpr
):
    """Count tiles that hold keys the last queries see; a row without keys has an empty one."""
    first = find_first_visible_key(length - QUERIES, WINDOW, CHUNK) // TILE
    return tl.maximum(tl.cdiv(length, TILE) - first, 1)


@triton.jit
def count_tiles_per_grain(tiles, SPLITS: tl.constexpr):
    """Count tiles of a grain: 1, or with SPLITS what its own length asks for."""
    # Whole multiples of 8 tiles, so that short rows are not cut at all.
    return tl.cdiv(tl.cdiv(tiles, SPLITS), 8) * 8 if SPLITS else 1


@triton.jit
def count_leading_grains(SPLITS: tl.constexpr):
    """Count the grains of a row before its first tile."""
    return 0 if SPLITS else 1


@triton.jit
def count_grains_per_program(total, programs, least):
    """Count grains of each program's share."""
    return tl.maximum(tl.cdiv(total, programs), least)
