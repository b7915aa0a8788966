"""How long weights take from ranks that train to ranks that serve, by the plan that moves them.

The plan is `policy.resharding`'s, the one that is carried out; its seats are GPUs of the cluster. A
source sends one parcel after the other, packed before it leaves. What comes to one GPU shares its
links. Targets check what has come, and write it where weights lie, when all of it is there.
"""

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.resharding.weight_transfer import (
    BUCKET_BYTES,
    ELEMENT_BYTES,
    WeightBucket,
    WeightTransferPlan,
)
from meshwright.predict.network.collective_cost import collective_s
from meshwright.predict.network.nccl_constants import DEFAULT_NCCL
from meshwright.predict.network.nccl_tuning import NcclOp
from meshwright.predict.network.placement import build_placement
from meshwright.spec.cluster import Cluster

_SEAL_PASSES = 10
"""How often a seal goes over a parcel: four times it mixes what it reads and writes it, twice it
sums."""


class WeightTransferTime(msgspec.Struct, frozen=True, kw_only=True):
    """What one version of weights costs, in seconds and bytes."""

    seconds: float
    """From the first parcel until every target has the version."""
    send_s: float
    """Of that, until the last parcel has come: the busiest GPU's time."""
    apply_s: float
    """Of that, checking and writing: the slowest target's."""
    busiest_gpu: int
    """The GPU that sends or gets for longest."""
    moved_bytes: int
    """What arrives at other GPUs than it came from."""
    staging_bytes: int
    """The most that a target keeps beside its weights until it has all."""
    mean_send_s: float
    """The mean time that sources send: far below `send_s` where few of them have most to send, or
    where one target gets most."""


def predict_weight_transfer(
    plan: WeightTransferPlan,
    cluster: Cluster,
    *,
    most_bytes: int = BUCKET_BYTES,
    nccl: str = DEFAULT_NCCL,
) -> WeightTransferTime:
    """Return what it costs to carry a plan out by NCCL on a cluster.

    Raises:
        InputError: where the plan has seats that the cluster has not.
    """
    seats = (*plan.source_devices, *plan.target_devices)
    if max(seats) >= cluster.gpus:
        what = f"{cluster.name} has {cluster.gpus} GPUs, the plan needs {max(seats) + 1}"
        raise InputError([Problem("cluster", what, f"use with_gpus({max(seats) + 1})")])
    rate = cluster.gpu.memory_bytes_per_s
    sends, gets, takes = (dict.fromkeys(seats, 0.0) for _ in range(3))
    aside = dict.fromkeys(plan.target_devices, 0)
    for parcel in plan.make_buckets(most_bytes):
        source = plan.source_devices[parcel.source]
        targets = [plan.target_devices[to] for to in parcel.targets]
        sends[source] += _pack_bytes(parcel) / rate
        for target in targets:
            takes[target] += _take_bytes(parcel) / rate
            aside[target] += parcel.size_bytes
        if plan.is_local(parcel):
            continue
        group = build_placement(cluster, (source, *targets))
        op: NcclOp = "send_recv" if len(targets) == 1 else "broadcast"
        wire_s = collective_s(group, op, parcel.size_bytes, nccl)
        sends[source] += wire_s
        for target in targets:
            gets[target] += wire_s
    busy = {seat: max(sends[seat], gets[seat]) for seat in seats}
    busiest = max(busy, key=lambda seat: (busy[seat], -seat))
    take_s = max(takes.values())
    return WeightTransferTime(
        seconds=busy[busiest] + take_s,
        send_s=busy[busiest],
        apply_s=take_s,
        busiest_gpu=busiest,
        moved_bytes=plan.moved_bytes,
        staging_bytes=max(aside.values()),
        mean_send_s=sum(sends[seat] for seat in plan.source_devices) / len(plan.source_devices),
    )


def _pack_bytes(parcel: WeightBucket) -> float:
    """Return what a source reads and writes in its own memory for a parcel."""
    rounded = sum(
        each.box.num_elements * (2 * ELEMENT_BYTES[name])
        for each in parcel.slices
        for name in each.source_casts[1:-1]
    )
    read = sum(each.box.num_elements * ELEMENT_BYTES[each.formats[0]] for each in parcel.slices)
    return rounded + read + parcel.size_bytes * (1 + _SEAL_PASSES)


def _take_bytes(parcel: WeightBucket) -> float:
    """Return what a target reads and writes in its own memory for a parcel."""
    written = sum(
        each.box.num_elements * ELEMENT_BYTES[name]
        for each in parcel.slices
        for name in (*each.target_casts[1:], each.target_casts[-1])
    )
    return parcel.size_bytes * (1 + _SEAL_PASSES) + written
