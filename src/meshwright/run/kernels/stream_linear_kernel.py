"""The kernel of products that read a large weight for few rows; `stream_linear` says which."""

# Triton compiles these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

from meshwright.run.kernels.glu import gated_value
from meshwright.run.kernels.language import INTERPRETED, inputs_ready, tl, triton


# Not compiled anew for a number of rows that happens to be 1 or a multiple of 16.
@triton.jit(do_not_specialize=["rows"])
def stream_tile(
    x,
    weight,
    weight_at,
    out,
    limit,
    rows,
    columns,
    inner,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    THREADS: tl.constexpr,
    AHEAD: tl.constexpr,
    TURNED: tl.constexpr,
    COPIES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute one tile of the result: of a product, or of gate and up with their activation.

    `weight_at` is the address of the weight; with COPIES `x` and `weight` are descriptors for
    tensor-memory copies, else addresses too.
    """
    gated: tl.constexpr = ACTIVATION is not None
    blocks = tl.cdiv(rows, ROWS)
    program = tl.program_id(0)
    # Programs that read the same part of the weight are neighbours: one of them fetches it.
    column = program // blocks * COLUMNS
    row = program % blocks * ROWS
    if AHEAD:
        lines: tl.constexpr = 2 * COLUMNS if gated else COLUMNS
        _ask_ahead(weight_at, column, columns, inner, lines, COLUMNS, AHEAD, THREADS)
    inputs_ready(EARLY)
    if TURNED:
        one = tl.zeros((COLUMNS, ROWS), tl.float32)
    else:
        one = tl.zeros((ROWS, COLUMNS), tl.float32)
    two = one
    for begin in range(0, inner, DEPTH):
        some = _tile(x, row, begin, rows, inner, ROWS, DEPTH, COPIES)
        first = _tile(weight, column, begin, columns, inner, COLUMNS, DEPTH, COPIES)
        one = _multiplied(some, first, one, TURNED)
        if gated:
            # Past the last column of the gate are rows of up: nobody stores what comes of them.
            second = _tile(
                weight, columns + column, begin, 2 * columns, inner, COLUMNS, DEPTH, COPIES
            )
            two = _multiplied(some, second, two, TURNED)
    if gated:
        one = gated_value(one, two, limit, ACTIVATION)
    if TURNED:
        one = tl.trans(one)
    here_row = row + tl.arange(0, ROWS)
    here = column + tl.arange(0, COLUMNS)
    inside = (here_row < rows)[:, None] & (here < columns)[None, :]
    place = out + here_row.to(tl.int64)[:, None] * columns + here[None, :]
    tl.store(place, one.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _multiplied(some, weight, total, TURNED: tl.constexpr):
    """Add a product to a total; turned, the weight's rows are those of the result."""
    if TURNED:
        total = tl.dot(weight, tl.trans(some), total)
    else:
        total = tl.dot(some, tl.trans(weight), total)
    return total


@triton.jit
def _tile(
    source, row, begin, rows, inner,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, COPIES: tl.constexpr,
):  # fmt: skip
    """Read a tile of a matrix whose rows are `inner` long, a multiple of DEPTH."""
    if COPIES:
        tile = source.load([row, begin])
    else:
        # Rows past the last are read as the last: what comes of them is not stored.
        line = tl.minimum(row + tl.arange(0, ROWS), rows - 1).to(tl.int64)
        tile = tl.load(source + line[:, None] * inner + (begin + tl.arange(0, DEPTH))[None, :])
    return tile


@triton.jit
def _ask_ahead(
    weight, column, columns, inner,
    LINES: tl.constexpr, COLUMNS: tl.constexpr, AHEAD: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Ask for the first AHEAD elements of the weight's rows, into the second-level cache.

    A weight does not depend on the kernel before, so this need not wait for its end. Writes arrive
    in that cache, too: even a weight that changes meanwhile is read as it is then.
    """
    if not INTERPRETED:
        shares: tl.constexpr = THREADS // LINES if THREADS > LINES else 1
        each: tl.constexpr = AHEAD // shares
        thread = tl.arange(0, LINES * shares)
        line = thread // shares
        row = column + line % COLUMNS
        row = tl.minimum(row, columns - 1) + line // COLUMNS * columns
        here = weight + row.to(tl.int64) * inner + thread % shares * each
        width: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        many = tl.full((LINES * shares,), each * width, tl.int32)
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
            "=r,l,r",
            [here, many],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
