"""`predict_all_gather_sync`: time of a weight sync in which every rank gathers the whole model.

So Megatron-Bridge exports a model and NeMo-RL sends it. One tensor after the other: who has it
sends it to the other stages, then tensor-parallel ranks gather it, then those with other experts.
Engines on the same GPUs copy their part out of a buffer; others get every tensor from the first
rank, which sends one buffer while it gathers the next. It is the only one of its node that sends,
so all of the model leaves through its own link.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.predict.network.collective_cost import collective_s
from meshwright.predict.network.placement import Placement, build_placement
from meshwright.predict.rl.weight_transfer_time import WeightTransferTime
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Layout
from meshwright.spec.layout.ranks import get_process_group
from meshwright.spec.model import Model, count_parameters

_BYTES = 2.0
_BUFFER_SHARE = 0.02
"""Of a GPU's memory, for a buffer of tensors that are sent together."""


class _Export(NamedTuple):
    """Tensors that are gathered in the same way."""

    calls: int
    elements: int
    """Of one tensor."""
    shards: int
    experts: bool


def predict_all_gather_sync(
    *,
    model: Model,
    cluster: Cluster,
    training: Layout,
    serving: Layout,
    engines: int,
    shared: bool,
) -> WeightTransferTime:
    """Return what one version of weights takes to all engines."""
    seats = max(training.gpus, engines * serving.gpus + (0 if shared else training.gpus))
    if seats > cluster.gpus:
        what = f"{cluster.name} has {cluster.gpus} GPUs, both sides need {seats}"
        raise InputError([Problem("cluster", what, f"use with_gpus({seats})")])
    whole = _BYTES * count_parameters(model).total
    gather_s = _gather_s(model, cluster, training)
    rate = cluster.gpu.memory_bytes_per_s
    taken = whole / serving.gpus
    # Into the buffer and, of that, what an engine's rank needs into its place.
    take_s = 2 * (whole + taken) / rate
    buffer = min(whole, _BUFFER_SHARE * cluster.gpu.memory_bytes)
    if shared:
        send_s, moved = gather_s, whole * training.gpus
    else:
        first = training.gpus
        targets = range(first, first + engines * serving.gpus)
        each = max(
            collective_s(build_placement(cluster, (0, *some), sharers=1.0), "broadcast", buffer)
            for some in (targets, targets[:1])
        )
        send_s = max(gather_s, whole / buffer * each)
        moved = whole * (training.gpus + engines * serving.gpus)
    return WeightTransferTime(
        seconds=send_s + take_s,
        send_s=send_s,
        apply_s=take_s,
        busiest_gpu=0,
        moved_bytes=int(moved),
        staging_bytes=int(2 * buffer),
        mean_send_s=gather_s,
    )


@lru_cache(maxsize=64)
def _gather_s(model: Model, cluster: Cluster, layout: Layout) -> float:
    """Return how long all ranks need until each has seen every tensor."""

    def of(axis: str) -> Placement:
        return build_placement(cluster, get_process_group(layout, 0, axis))

    stages, parts = of("pp"), of("tp")
    among = of("expert_tp"), of("ep")
    seconds = 0.0
    for one in _exports(model, layout):
        part = _BYTES * one.elements / one.shards
        each = collective_s(stages, "broadcast", part)
        if one.shards > 1:
            group = among[0] if one.experts else parts
            each += collective_s(group, "all_gather", part * one.shards)
        if one.experts:
            each += collective_s(among[1], "all_gather", _BYTES * one.elements * layout.ep)
        seconds += one.calls * each
    return seconds


def _exports(model: Model, layout: Layout) -> Iterator[_Export]:
    """Yield all matrices; vectors are small and ride along."""
    for block, layers in model.count_layers_by_block():
        for weight in block.list_weights(model.hidden):
            experts = weight.part == "expert"
            shards = weight.count_shards(layout.effective_expert_tp if experts else layout.tp)
            copies = weight.copies // layout.ep if experts else weight.copies
            yield _Export(layers * copies, weight.entries_per_copy, shards, experts)
    tables = 1 if model.tied else 2
    yield _Export(tables, model.vocab * model.hidden, layout.tp, experts=False)
