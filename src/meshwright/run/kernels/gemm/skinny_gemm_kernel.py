"""The kernel of products that read a large weight for few rows; `skinny_linear` says which."""

# Triton compiles these functions itself: their arguments are its own values, not Python's.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# ruff: noqa: PLR0917

from meshwright.run.kernels.activation.glu import activate_and_gate
from meshwright.run.kernels.triton_compat import tl, triton, wait_for_inputs


# Not compiled anew for a number of rows that happens to be 1 or a multiple of 16.
@triton.jit(do_not_specialize=["rows"])
def skinny_gemm_kernel(
    x,
    weight,
    out,
    limit,
    rows,
    columns,
    inner,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    TURNED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute one tile of the result: of a product, or of gate and up with their activation.

    `x` and `weight` are descriptors of tiles, for tensor-memory copies.
    """
    gated: tl.constexpr = ACTIVATION is not None
    blocks = tl.cdiv(rows, ROWS)
    program = tl.program_id(0)
    # Programs that read the same part of the weight are neighbours: one of them fetches it.
    column = program // blocks * COLUMNS
    row = program % blocks * ROWS
    wait_for_inputs(PDL)
    if TURNED:
        one = tl.zeros((COLUMNS, ROWS), tl.float32)
    else:
        one = tl.zeros((ROWS, COLUMNS), tl.float32)
    two = one
    for begin in range(0, inner, DEPTH):
        some = x.load([row, begin])
        one = _multiplied(some, weight.load([column, begin]), one, TURNED)
        if gated:
            # Past the last column of the gate are rows of up: nobody stores what comes of them.
            two = _multiplied(some, weight.load([columns + column, begin]), two, TURNED)
    if gated:
        one = activate_and_gate(one, two, limit, ACTIVATION)
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
