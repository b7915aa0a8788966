"""Which chunks of a rank use a parameter, and which unit it is gathered with.

A unit is a layer, a multi-token head, or what stands at an end: the embedding, and the final norm
with the output head. Where the head reads the embedding's weight both ends are one unit.
"""

from collections.abc import Iterable, Mapping
from itertools import groupby

from torch import nn

from meshwright.run.nn.decoder import Decoder
from meshwright.run.parallel.pipeline_parallel.pipeline_stage import PipelineStage
from meshwright.run.parallel.sharded_model import ShardedModel
from meshwright.run.parallel.zero.buckets import BucketRequest

EMBEDDING_UNIT, HEAD_UNIT = "embedding", "head"
"""The units at the ends."""
_FIRST = ("embedding", "positions", "norm_embedding")
_PARTS = ("norm_mixer", "mixer", "norm_mixer_after", "norm_mlp", "mlp", "norm_mlp_after")
"""Those of a layer, in the order of use."""


def list_bucket_requests(
    sharded_model: ShardedModel, learning: Mapping[str, nn.Parameter]
) -> list[BucketRequest]:
    """Describe parameters, in the order of use, to those who fill buckets with them."""
    return [
        BucketRequest(
            name,
            learning[name].numel(),
            learning[name].dtype,
            sharded_model.shard_specs[name].is_expert,
            sharded_model.shard_specs[name].grad_sum_group,
            find_chunks_using(
                sharded_model.gathered_with.get(name, name), sharded_model.pipeline_stage
            ),
            sharded_model.shard_specs[name].shared_stage_group,
            get_fsdp_unit(sharded_model.decoder, sharded_model.gathered_with.get(name, name)),
        )
        for name in sort_by_use(learning)
    ]


def sort_by_use(names: Iterable[str]) -> list[str]:
    """Sort parameters of each layer by the part that uses them first.

    Modules have their norms last, and buckets are filled from the end: the first bucket of a layer
    would wait for the norm before its mixer, whose gradient backward makes last.
    """
    found = []
    for _, own in groupby(names, key=lambda name: name.split(".")[:2]):
        found += sorted(own, key=_part)
    return found


def _part(name: str) -> int:
    room, _, rest = name.partition(".")
    part = rest.split(".")[1] if room == "layers" else ""
    return _PARTS.index(part) if part in _PARTS else 0


def find_chunks_using(name: str, stage: PipelineStage) -> frozenset[int]:
    """Return the chunks of a rank that use a parameter."""
    first, _, rest = name.partition(".")
    chunks, decoder = stage.chunks.items(), stage.decoder
    if first == "layers":
        index = int(rest.partition(".")[0])
        return frozenset(at for at, each in chunks if each.first <= index < each.last)
    ends = {at for at, each in chunks if each.has_head}
    if first not in _FIRST:
        return frozenset(ends)
    found = {at for at, each in chunks if each.has_embedding}
    if decoder.model.tied or len(decoder.multi_token):
        found |= ends
    return frozenset(found)


def get_fsdp_unit(decoder: Decoder, name: str) -> str:
    """Name the unit of a parameter."""
    first, _, rest = name.partition(".")
    if first in {"layers", "multi_token"}:
        return f"{first}.{rest.partition('.')[0]}"
    return get_first_unit(decoder) if first in _FIRST else HEAD_UNIT


def get_first_unit(decoder: Decoder) -> str:
    """Name the unit that has the embedding."""
    reads_embedding = hasattr(decoder, "head") and decoder.head.weight is None
    return HEAD_UNIT if reads_embedding else EMBEDDING_UNIT
