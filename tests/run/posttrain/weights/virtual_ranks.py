"""Ranks of a layout in one process: each is built in turn, in a process group of torch's fakes.

First weights hang on their places in the whole model alone, so a rank's part of the same model
under any layout is known without sending anything.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from meshwright.run.nn.build import Options
from meshwright.run.nn.placed import Placed
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.rehearsal import fake_world
from meshwright.run.parallel.spread import Spread, spread
from meshwright.run.parallel.sync import make_sync
from meshwright.run.posttrain.weights.tensors import Place, of_rank, of_sync, places
from meshwright.run.serve.model.quantise import quantise
from meshwright.spec.layout import Layout
from meshwright.spec.model import Experts, Model, decoder

DENSE = decoder("dense", layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61)
TIED = decoder("tied", layers=4, hidden=32, heads=4, ffn=48, vocab=61, tied=True)
ROUTED = decoder(
    "experts", layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61, dense_layers=2,
    experts=Experts(count=4, top_k=2, width=16, shared_width=16),
)  # fmt: skip
SERVED = Options(multi_token=False)


def sources(
    model: Model, layout: Layout, *, dtype: torch.dtype = torch.bfloat16, seed: int = 1
) -> list[dict[str, Placed]]:
    """Return what each rank that trains under a layout has to send."""
    found = []
    for rank in range(layout.gpus):
        with fake_world(rank, layout.gpus):
            mine = spread(model, Mesh(layout), dtype=dtype, seed=seed)
            sync = make_sync(mine, bucket_bytes=4096)
            found.append(of_sync(sync) if layout.zero == 3 else of_rank(mine))
    return found


def served(
    model: Model, layout: Layout, *, dtype: torch.dtype = torch.bfloat16, seed: int, fp8: bool
) -> list[dict[str, Place]]:
    """Return the weights of each rank that serves, as they were first drawn with a seed."""
    ranks = [_served(model, layout, rank, dtype, seed, fp8=fp8) for rank in range(layout.gpus)]
    return [{name: _copy(place) for name, place in each.items()} for each in ranks]


def _copy(place: Place) -> Place:
    placed = Placed(place.placed.tensor.clone(), place.placed.whole, place.placed.parts)
    return Place(placed, place.formats, None if place.scale is None else place.scale.clone())


@cache
def _served(
    model: Model, layout: Layout, rank: int, dtype: torch.dtype, seed: int, *, fp8: bool
) -> dict[str, Place]:
    with fake_world(rank, layout.gpus):
        mine: Spread = spread(model, Mesh(layout), dtype=dtype, seed=seed, options=SERVED)
    if fp8:
        quantise(mine.decoder, "fp8")
    return places(mine.decoder, mine.holdings)


def differing(found: Sequence[dict[str, Place]], right: Sequence[dict[str, Place]]) -> list[str]:
    """Name the tensors that differ in any bit."""
    assert [list(each) for each in found] == [list(each) for each in right]
    return [
        f"{rank}: {name}"
        for rank, each in enumerate(found)
        for name, place in each.items()
        if not _equal(place.placed.tensor, right[rank][name].placed.tensor)
        or not _equal(place.scale, right[rank][name].scale)
    ]


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
