"""Ranks of a layout in one process: each is built in turn, in a process group of torch's fakes.

First weights hang on their places in the whole model alone, so a rank's part of the same model
under any layout is known without sending anything.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.run.nn.build import Options, build
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.holding import Holding
from meshwright.run.nn.initialise import materialise
from meshwright.run.nn.placed import Placed
from meshwright.run.parallel.holdings import holdings
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.rehearsal import fake_world
from meshwright.run.parallel.spread import hold, spread
from meshwright.run.parallel.stage import keep_layers
from meshwright.run.parallel.sync import make_sync
from meshwright.run.posttrain.weights.tensors import Place, of_masters, of_rank, of_sync, places
from meshwright.run.serve.model.quantise import quantise
from meshwright.run.train.optimizer.optimizer import make_optimizer
from meshwright.run.train.optimizer.settings import OptimizerSettings
from meshwright.spec.layout import Layout
from meshwright.spec.layout.ranks import coordinate
from meshwright.spec.layout.stages import rank_chunks
from meshwright.spec.model import Experts, Model, decoder

DENSE = decoder("dense", layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61)
TIED = decoder("tied", layers=4, hidden=32, heads=4, ffn=48, vocab=61, tied=True)
ROUTED = decoder(
    "experts", layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61, dense_layers=2,
    experts=Experts(count=4, top_k=2, width=16, shared_width=16),
)  # fmt: skip


def sources(
    model: Model, layout: Layout, *, dtype: torch.dtype = torch.bfloat16, seed: int = 1
) -> list[dict[str, Placed]]:
    """Return what each rank that trains under a layout has to send."""
    found = []
    for rank in range(layout.gpus):
        with fake_world(rank, layout.gpus):
            found.append(_trained(model, Mesh(layout), dtype, seed))
    return found


def rank_sources(model: Model, layout: Layout, rank: int) -> dict[str, Placed]:
    """Return the same of one rank where a process group is running, of this layout or of more."""
    if dist.get_world_size() == layout.gpus:
        return _trained(model, Mesh(layout), torch.bfloat16, 1)
    assert layout.zero < 3, "shards are cut by groups of the whole layout"
    mine, held = _part(model, layout, rank, torch.bfloat16, 1)
    return {name: Placed.of(each.detach(), held[name]) for name, each in mine.named_parameters()}


def masters(model: Model, layout: Layout, *, steps: int) -> list[dict[str, Placed]]:
    """Return the exact weights of each rank after some updates by gradients of ones."""
    found = []
    for rank in range(layout.gpus):
        with fake_world(rank, layout.gpus):
            mine = spread(model, Mesh(layout), dtype=torch.bfloat16, seed=1)
            sync = make_sync(mine, bucket_bytes=4096)
            updated = dict(sync.named_parameters())
            # Without clipping, every element is updated by itself.
            settings = OptimizerSettings(clip=None)
            optimizer = make_optimizer(updated.items(), layout, settings, total_steps=9)
            ones = {name: torch.ones_like(each).float() for name, each in updated.items()}
            for _ in range(steps):
                optimizer.step(1e-4, gradients=ones)
            found.append(of_masters(sync, optimizer))
    return found


def _trained(model: Model, mesh: Mesh, dtype: torch.dtype, seed: int) -> dict[str, Placed]:
    mine = spread(model, mesh, dtype=dtype, seed=seed)
    sync = make_sync(mine, bucket_bytes=4096)
    return of_sync(sync) if mesh.layout.zero == 3 else of_rank(mine)


def served(
    model: Model, layout: Layout, *, dtype: torch.dtype = torch.bfloat16, seed: int, fp8: bool
) -> list[dict[str, Place]]:
    """Return the weights of each rank that serves, as they were first drawn with a seed."""
    return [
        rank_served(model, layout, rank, dtype=dtype, seed=seed, fp8=fp8)
        for rank in range(layout.gpus)
    ]


def rank_served(
    model: Model,
    layout: Layout,
    rank: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    seed: int,
    fp8: bool,
) -> dict[str, Place]:
    """Return the same of one rank: memory of its own each time."""
    made = _served(model, layout, rank, dtype, seed, fp8=fp8)
    return {name: _copy(place) for name, place in made.items()}


@cache
def _served(
    model: Model, layout: Layout, rank: int, dtype: torch.dtype, seed: int, *, fp8: bool
) -> dict[str, Place]:
    whole, held = _part(model, layout, rank, dtype, seed)
    if fp8:
        quantise(whole, "fp8")
    return places(whole, held)


def _part(
    model: Model, layout: Layout, rank: int, dtype: torch.dtype, seed: int
) -> tuple[Decoder, dict[str, Holding]]:
    """Build what a rank holds, without the groups that it would compute with."""
    mine = build(model, dtype=dtype, options=Options(multi_token=False))
    held = holdings(mine, layout, rank)
    if layout.pp > 1:
        keep_layers(mine, rank_chunks(layout, model.layers)[coordinate(layout, rank).pp])
    held = {name: held[name] for name, _ in mine.named_parameters()}
    hold(mine, held)
    materialise(mine, torch.device("cpu"), seed, held)
    return mine, held


def _copy(place: Place) -> Place:
    return _with(place, lambda tensor: tensor.clone())


def on_gpu(place: Place) -> Place:
    """Return the same in the memory of a GPU."""
    return _with(place, lambda tensor: tensor.cuda())


def _with(place: Place, make: Callable[[Tensor], Tensor]) -> Place:
    placed = Placed(make(place.placed.tensor), place.placed.whole, place.placed.parts)
    return Place(placed, place.formats, None if place.scale is None else make(place.scale))


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
