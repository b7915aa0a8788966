"""How ranks that share a model share an adapter: as they share the layers it stands beside.

    rows of W are shared       A whole, each rank with a part of its gradient; B and m by rows
    columns of W are shared    A by columns; B and m whole, each rank with a part of their gradient
    W is whole                 all are, with gradients as W's would be

So what a layer adds is a part of the same sum, or the same rows, as its own product, and nothing
more is exchanged but for the lengths of rows whose columns are shared (DoRA). Where ranks hold the
same keys and values, they hold the same rows of B.

Shapes: K inputs, M outputs, R rank.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshwright.errors import InputError, Problem
from meshwright.run.nn.holding import Holding, Range
from meshwright.run.parallel.spread import Spread

A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"
"""Parameters of a pair, by PEFT's names."""


class Rows(NamedTuple):
    """What a rank holds of the rows of one module of theirs."""

    theirs: Tensor
    """Their numbers in the module, from the first on."""
    twins: Range | None
    """Those of them, by place, that neighbours hold too."""


def rows_here(source: Tensor, count: int, twin_rows: Range | None) -> Rows:
    """Return what a layer of a rank has of a module's `count` rows.

    `source` has the module's row for each row of the layer, or `count`; `twin_rows` are those of
    the layer that neighbours hold too.
    """
    mine = source < count
    theirs, order = torch.sort(source[mine])
    if twin_rows is None:
        return Rows(theirs, None)
    here = torch.arange(len(source))
    shared = ((here >= twin_rows.start) & (here < twin_rows.stop))[mine][order].nonzero().flatten()
    if not len(shared):
        return Rows(theirs, None)
    found = Range(int(shared[0]), int(shared[-1]) + 1)
    if found.size != len(shared):
        what = "ranks hold the same keys, whose rows lie apart in a module of this family"
        fix = "use no more tensor-parallel ranks than key and value heads"
        raise InputError([Problem("layout.tp", what, fix)])
    return Rows(theirs, found)


def pair_holdings(weight: Holding, rows: Rows, count: int, rank: int) -> dict[str, Holding]:
    """Return how a rank holds a pair beside a layer whose weight it holds so.

    The module has `count` rows, of which the rank has `rows`.
    """
    inputs = weight.whole[1]
    a, b = Holding.all_of((rank, inputs)), Holding.all_of((count, rank))
    magnitude = Holding.all_of((count,))
    if weight.shape[0] != weight.whole[0]:
        a = replace(a, partial="tp")
        if len(rows.theirs) == count:  # every rank has the same rows, each for its own queries
            b, magnitude = replace(b, partial="tp"), replace(magnitude, partial="tp")
        else:
            twins = {} if rows.twins is None else {"twins": weight.twins, "twin_rows": rows.twins}
            ranges = _runs(rows.theirs)
            b = replace(b, parts=(ranges, *b.parts[1:]), **twins)  # type: ignore[arg-type]
            magnitude = replace(magnitude, parts=(ranges,), **twins)  # type: ignore[arg-type]
    elif weight.shape[1] != inputs:
        a = replace(a, parts=(a.parts[0], weight.parts[1]))
        b, magnitude = replace(b, partial="tp"), replace(magnitude, partial="tp")
    else:
        a, b, magnitude = (replace(one, partial=weight.partial) for one in (a, b, magnitude))
    found = {A: a, B: b, MAGNITUDE: magnitude}
    return {name: replace(one, stages=weight.stages) for name, one in found.items()}


def _runs(numbers: Tensor) -> tuple[Range, ...]:
    """Return sorted numbers as runs without gaps."""
    found: list[Range] = []
    for number in numbers.tolist():
        if found and found[-1].stop == number:
            found[-1] = Range(found[-1].start, number + 1)
        else:
            found.append(Range(number, number + 1))
    return tuple(found) or (Range(0, 0),)


@torch.no_grad()
def gather(
    spread: Spread,
    mine: Mapping[str, nn.Parameter],
    shapes: Mapping[str, tuple[int, ...]],
    *,
    keep: bool,
) -> dict[str, Tensor]:
    """Return whole parameters of which ranks hold parts, on the host; all ranks take part.

    `shapes` are those of all, in one order on all ranks; who does not `keep` them returns nothing.
    """
    mesh, found = spread.mesh, {}
    for name, shape in shapes.items():
        # Less than any number: the largest is what a rank has, bit by bit, whoever else has it.
        whole = torch.full(shape, -torch.inf, device=mesh.device)
        if name in mine:
            for box in spread.holdings[name].boxes():
                whole[_cut(box.whole)] = mine[name][_cut(box.local)]
        whole = mesh.world.all_reduce(whole, "max")
        assert not torch.isneginf(whole).any(), f"no rank holds all of {name}"
        if keep:
            found[name] = whole.cpu()
    return found


def _cut(ranges: tuple[Range, ...]) -> tuple[slice, ...]:
    return tuple(slice(each.start, each.stop) for each in ranges)
