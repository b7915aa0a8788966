"""How long weights take from ranks that train to ranks that serve, by the plan that moves them.

The plan is `policy.transfer`'s, the one that is carried out; its seats are GPUs of the cluster. A
source sends one parcel after the other, packed before it leaves. What comes to one GPU shares its
links. Targets check what has come, and write it where weights lie, when all of it is there.
"""

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.transfer import ELEMENT_BYTES, PARCEL_BYTES, Parcel, Transfer
from meshwright.predict.network.collective import collective_s
from meshwright.predict.network.constants import DEFAULT_NCCL
from meshwright.predict.network.placement import placement
from meshwright.predict.network.tuning import Op
from meshwright.spec.cluster import Cluster

_SEAL_PASSES = 10
"""How often a seal goes over a parcel: four times it mixes what it reads and writes it, twice it
sums."""


class TransferTime(msgspec.Struct, frozen=True, kw_only=True):
    """What one version of weights costs, in seconds and bytes."""

    seconds: float
    """From the first parcel until every target has the version."""
    send_s: float
    """Of that, until the last parcel has come: the busiest GPU's time."""
    take_s: float
    """Of that, checking and writing: the slowest target's."""
    busiest: int
    """The GPU that sends or gets for longest."""
    moved_bytes: int
    """What arrives at other GPUs than it came from."""
    aside_bytes: int
    """The most that a target keeps beside its weights until it has all."""
    mean_send_s: float
    """The mean time that sources send: far below `send_s` where few of them have most to send, or
    where one target gets most."""


def predict_transfer(
    plan: Transfer,
    cluster: Cluster,
    *,
    most_bytes: int = PARCEL_BYTES,
    nccl: str = DEFAULT_NCCL,
) -> TransferTime:
    """Return what it costs to carry a plan out by NCCL on a cluster.

    Raises:
        InputError: where the plan has seats that the cluster has not.
    """
    seats = (*plan.source_seats, *plan.target_seats)
    if max(seats) >= cluster.gpus:
        what = f"{cluster.name} has {cluster.gpus} GPUs, the plan needs {max(seats) + 1}"
        raise InputError([Problem("cluster", what, f"use with_gpus({max(seats) + 1})")])
    rate = cluster.gpu.memory_bytes_per_s
    sends, gets, takes = (dict.fromkeys(seats, 0.0) for _ in range(3))
    aside = dict.fromkeys(plan.target_seats, 0)
    for parcel in plan.parcels(most_bytes):
        source = plan.source_seats[parcel.source]
        targets = [plan.target_seats[to] for to in parcel.targets]
        sends[source] += _pack_bytes(parcel) / rate
        for target in targets:
            takes[target] += _take_bytes(parcel) / rate
            aside[target] += parcel.bytes
        if plan.is_local(parcel):
            continue
        group = placement(cluster, (source, *targets))
        op: Op = "send_recv" if len(targets) == 1 else "broadcast"
        wire_s = collective_s(group, op, parcel.bytes, nccl)
        sends[source] += wire_s
        for target in targets:
            gets[target] += wire_s
    busy = {seat: max(sends[seat], gets[seat]) for seat in seats}
    busiest = max(busy, key=lambda seat: (busy[seat], -seat))
    take_s = max(takes.values())
    return TransferTime(
        seconds=busy[busiest] + take_s,
        send_s=busy[busiest],
        take_s=take_s,
        busiest=busiest,
        moved_bytes=plan.moved_bytes,
        aside_bytes=max(aside.values()),
        mean_send_s=sum(sends[seat] for seat in plan.source_seats) / len(plan.source_seats),
    )


def _pack_bytes(parcel: Parcel) -> float:
    """Return what a source reads and writes in its own memory for a parcel."""
    rounded = sum(
        each.box.elements * (2 * ELEMENT_BYTES[name])
        for each in parcel.slices
        for name in each.before[1:-1]
    )
    read = sum(each.box.elements * ELEMENT_BYTES[each.path[0]] for each in parcel.slices)
    return rounded + read + parcel.bytes * (1 + _SEAL_PASSES)


def _take_bytes(parcel: Parcel) -> float:
    """Return what a target reads and writes in its own memory for a parcel."""
    written = sum(
        each.box.elements * ELEMENT_BYTES[name]
        for each in parcel.slices
        for name in (*each.after[1:], each.after[-1])
    )
    return parcel.bytes * (1 + _SEAL_PASSES) + written
