"""Ranks of a layout in one process: each is built in turn, in a process group of torch's fakes.

First weights hang on their places in the whole model alone, so a rank's part of the same model
under any layout is known without sending anything.
"""

from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.decoder_builder import BuildOptions, build_decoder
from meshwright.run.nn.sharding.shard_spec import ShardSpec
from meshwright.run.nn.sharding.sharded_tensor import ShardedTensor
from meshwright.run.nn.weight_init import materialize
from meshwright.run.parallel.mesh import Mesh
from meshwright.run.parallel.pipeline_parallel.pipeline_stage import drop_other_stages
from meshwright.run.parallel.shard_specs import make_shard_specs
from meshwright.run.parallel.sharded_model import shard_model, shrink_parameters
from meshwright.run.parallel.verify.dry_run import use_fake_process_group
from meshwright.run.parallel.zero.gradient_sync import make_gradient_sync
from meshwright.run.posttrain.weight_sync.weight_tensors import (
    WeightTarget,
    collect_master_weights,
    collect_rank_weights,
    collect_sharded_weights,
    collect_weight_targets,
)
from meshwright.run.serve.model.quantization import quantize_model
from meshwright.run.train.optimizer.optimizer import make_optimizer
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig
from meshwright.spec.layout import Layout
from meshwright.spec.layout.pipeline_chunks import list_chunks_by_rank
from meshwright.spec.layout.ranks import get_coordinate
from meshwright.spec.model import Model, MoESpec, build_decoder_model

DENSE = build_decoder_model("dense", layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61)
TIED = build_decoder_model("tied", layers=4, hidden=32, heads=4, ffn=48, vocab=61, tied=True)
ROUTED = build_decoder_model(
    "experts", layers=4, hidden=32, heads=4, kv_heads=2, ffn=48, vocab=61, dense_layers=2,
    experts=MoESpec(count=4, top_k=2, width=16, shared_width=16),
)  # fmt: skip


def sources(
    model: Model, layout: Layout, *, dtype: torch.dtype = torch.bfloat16, seed: int = 1
) -> list[dict[str, ShardedTensor]]:
    """Return what each rank that trains under a layout has to send."""
    found = []
    for rank in range(layout.gpus):
        with use_fake_process_group(rank, layout.gpus):
            found.append(_trained(model, Mesh(layout), dtype, seed))
    return found


def rank_sources(model: Model, layout: Layout, rank: int) -> dict[str, ShardedTensor]:
    """Return the same of one rank where a process group is running, of this layout or of more."""
    if dist.get_world_size() == layout.gpus:
        return _trained(model, Mesh(layout), torch.bfloat16, 1)
    assert layout.zero < 3, "shards are cut by groups of the whole layout"
    mine, held = _part(model, layout, rank, torch.bfloat16, 1)
    return {
        name: ShardedTensor.from_spec(each.detach(), held[name])
        for name, each in mine.named_parameters()
    }


def masters(model: Model, layout: Layout, *, steps: int) -> list[dict[str, ShardedTensor]]:
    """Return the exact weights of each rank after some updates by gradients of ones."""
    found = []
    for rank in range(layout.gpus):
        with use_fake_process_group(rank, layout.gpus):
            mine = shard_model(model, Mesh(layout), dtype=torch.bfloat16, seed=1)
            sync = make_gradient_sync(mine, bucket_bytes=4096)
            updated = dict(sync.named_parameters())
            # Without clipping, every element is updated by itself.
            settings = OptimizerConfig(clip_grad=None)
            optimizer = make_optimizer(updated.items(), layout, settings, total_steps=9)
            ones = {name: torch.ones_like(each).float() for name, each in updated.items()}
            for _ in range(steps):
                optimizer.step(1e-4, gradients=ones)
            found.append(collect_master_weights(sync, optimizer))
    return found


def _trained(model: Model, mesh: Mesh, dtype: torch.dtype, seed: int) -> dict[str, ShardedTensor]:
    mine = shard_model(model, mesh, dtype=dtype, seed=seed)
    sync = make_gradient_sync(mine, bucket_bytes=4096)
    return collect_sharded_weights(sync) if mesh.layout.zero == 3 else collect_rank_weights(mine)


def served(
    model: Model, layout: Layout, *, dtype: torch.dtype = torch.bfloat16, seed: int, fp8: bool
) -> list[dict[str, WeightTarget]]:
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
) -> dict[str, WeightTarget]:
    """Return the same of one rank: memory of its own each time."""
    made = _served(model, layout, rank, dtype, seed, fp8=fp8)
    return {name: _copy(place) for name, place in made.items()}


@cache
def _served(
    model: Model, layout: Layout, rank: int, dtype: torch.dtype, seed: int, *, fp8: bool
) -> dict[str, WeightTarget]:
    whole, held = _part(model, layout, rank, dtype, seed)
    if fp8:
        quantize_model(whole, "fp8")
    return collect_weight_targets(whole, held)


def _part(
    model: Model, layout: Layout, rank: int, dtype: torch.dtype, seed: int
) -> tuple[Decoder, dict[str, ShardSpec]]:
    """Build what a rank holds, without the groups that it would compute with."""
    mine = build_decoder(model, dtype=dtype, options=BuildOptions(include_mtp=False))
    held = make_shard_specs(mine, layout, rank)
    if layout.pp > 1:
        drop_other_stages(
            mine, list_chunks_by_rank(layout, model.layers)[get_coordinate(layout, rank).pp]
        )
    held = {name: held[name] for name, _ in mine.named_parameters()}
    shrink_parameters(mine, held)
    materialize(mine, torch.device("cpu"), seed, held)
    return mine, held


def _copy(place: WeightTarget) -> WeightTarget:
    return _with(place, lambda tensor: tensor.clone())


def on_gpu(place: WeightTarget) -> WeightTarget:
    """Return the same in the memory of a GPU."""
    return _with(place, lambda tensor: tensor.cuda())


def _with(place: WeightTarget, make: Callable[[Tensor], Tensor]) -> WeightTarget:
    placed = ShardedTensor(
        make(place.sharded_tensor.tensor),
        place.sharded_tensor.global_shape,
        place.sharded_tensor.chunks,
    )
    return WeightTarget(placed, place.formats, None if place.scale is None else make(place.scale))


def differing(
    found: Sequence[dict[str, WeightTarget]], right: Sequence[dict[str, WeightTarget]]
) -> list[str]:
    """Name the tensors that differ in any bit."""
    assert [list(each) for each in found] == [list(each) for each in right]
    return [
        f"{rank}: {name}"
        for rank, each in enumerate(found)
        for name, place in each.items()
        if not _equal(place.sharded_tensor.tensor, right[rank][name].sharded_tensor.tensor)
        or not _equal(place.scale, right[rank][name].scale)
    ]


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
