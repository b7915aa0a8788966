"""What keeping states and activations in host memory costs: transfers, and an update on the CPU.

What crosses a GPU's link to its host is what `predict.memory` takes off the device:

- activations, of all layers or of `offload_layers` of each chunk, go down in every forward pass and
  come up again in its backward;
- parameters come up for every pass, a layer ahead of its use (ZeRO-Infinity, arXiv 2104.07857);
- gradients go down in every backward, and from the second microbatch on their sum comes up first,
  so that the device adds to it (DeepSpeed's way);
- optimizer states never move: reduced gradients go down behind the last backward, the host updates
  in its own memory, new weights come up meanwhile (ZeRO-Offload, arXiv 2101.06840).

Copies run on the device's copy engines, beside compute and without slowing it: a product took no
longer beside copies both ways, a pass over memory 3 % longer (measured on an H200). So a pass waits
only for what does not fit behind it; Transformer Engine spreads the copies of a few layers over all
layers of the pass, so that the whole pass hides them. A wait cannot be made up for later, because
just two layers' worth lies on the device at a time. Not known here: network cards that share a
GPU's link, whether all of it fits in host memory, and disks.
"""

import copy
from typing import NamedTuple

import msgspec

from meshwright.predict.memory.buffers import stores_fp8_weights
from meshwright.predict.memory.memory_prediction import predict_memory
from meshwright.predict.step.grad_buckets import list_chunk_parameters
from meshwright.predict.step.pass_time import PassWaits
from meshwright.predict.step.stage_time import ChunkTime, StageTime
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import (
    StateBytes,
    count_rank_parameters,
    list_chunks,
    list_chunks_by_rank,
    stage_state_bytes,
)
from meshwright.spec.layout.model_states import BYTES_PER_ELEMENT


class HostConstants(msgspec.Struct, frozen=True, kw_only=True):
    """What software gets out of a host's links and memory."""

    link_share: float = 0.87
    """Share of a link's wire speed that a copy of pinned memory reaches: 55 of 63 GB/s either way,
    measured on an H200 with PCIe 5."""
    crossing: float = 0.26
    """How much of the smaller direction's time both add to the larger one's when copies run both
    ways at once: 43.7 GB/s each instead of 55, measured there too."""
    memory_share: float = 0.8
    """Share of a host's memory bandwidth that copies and streams reach (recalled: STREAM on
    two-socket servers)."""
    update_share: float = 0.5
    """Share of it that an update on the CPU reaches, counting what it must read and write.
    Recalled: table 4 of ZeRO-Offload, 0.22 s for a billion parameters and 2.57 s for ten on a
    DGX-2, whose host has 256 GB/s. One report of DeepSpeed on A100 nodes took nearly four times as
    long (its issue 6834)."""


HOST_CONSTANTS = HostConstants()

SOCKET_BYTES_PER_S = {"pcie4": 204.8e9, "pcie5": 307.2e9, "pcie6": 409.6e9, "c2c": 512e9}
"""Memory bandwidth of one CPU by the link of its generation, where a cluster does not say it:
eight channels of DDR4-3200 (EPYC 7002), of DDR5-4800 (Xeon of the 4th generation), of DDR5-6400
(Xeon 6), and the LPDDR5X of Grace. Unknown links take the least."""


class HostTraffic(NamedTuple):
    """Bytes that cross one GPU's link to its host."""

    to_host_bytes: float = 0.0
    """From the device to the host."""
    to_device_bytes: float = 0.0
    """From the host to the device."""


class PassTraffic(NamedTuple):
    """What the passes of one microbatch over one chunk move."""

    forward: HostTraffic
    backward: HostTraffic


class HostUpdate(NamedTuple):
    """What one rank's update moves, and behind what."""

    gradients: HostTraffic
    """While the last backward runs."""
    weights: HostTraffic
    """While the update runs."""


def host_bytes_per_s(cluster: Cluster) -> float:
    """Return the memory bandwidth of a node's host, as given or as its kind of CPU has it."""
    host = cluster.host
    if host.memory_bytes_per_s is not None:
        return host.memory_bytes_per_s
    least = min(SOCKET_BYTES_PER_S.values())
    return host.sockets * SOCKET_BYTES_PER_S.get(host.link, least)


def gpu_host_bytes_per_s(run: TrainingRun) -> float:
    """Return the share of it that one GPU has while all of a node that the layout uses do alike."""
    return host_bytes_per_s(run.cluster) / min(run.cluster.gpus_per_node, run.layout.gpus)


def transfer_s(
    run: TrainingRun, moved: HostTraffic, constants: HostConstants = HOST_CONSTANTS
) -> float:
    """Return how long a GPU's copies take while all GPUs of its node copy as much.

    Every GPU has a link of its own; the host's memory is shared.
    """
    larger, smaller = max(moved), min(moved)
    share, crossing = constants.link_share, constants.crossing
    if (measured := run.device_costs.calibration.link) is not None:
        share, crossing = measured.share, measured.crossing
    link = share * run.cluster.host.gpu_bytes_per_s
    memory = constants.memory_share * gpu_host_bytes_per_s(run)
    return max((larger + crossing * smaller) / link, (larger + smaller) / memory)


def host_update_s(
    run: TrainingRun, size_bytes: float, constants: HostConstants = HOST_CONSTANTS
) -> float:
    """Return the seconds of an update that reads and writes so much of the host's memory."""
    return size_bytes / (constants.update_share * gpu_host_bytes_per_s(run))


def offload_waits(
    run: TrainingRun, times: tuple[ChunkTime, ...], waits: tuple[PassWaits, ...]
) -> tuple[PassWaits, ...]:
    """Return the waits of every chunk's passes with those for host memory."""
    if run.layout.offload == ("optimizer",):
        return waits  # moves once a step
    found = []
    for time, late, moved in zip(times, waits, pass_traffic(run), strict=True):
        forward = time.total.forward_s + late.forward_dp_s
        backward = time.total.backward_s + late.backward_dp_s
        found.append(
            late._replace(
                forward_offload_s=max(0.0, transfer_s(run, moved.forward) - forward),
                backward_offload_s=max(0.0, transfer_s(run, moved.backward) - backward),
            )
        )
    return tuple(found)


def pass_traffic(
    run: TrainingRun, activations: tuple[float, ...] | None = None
) -> tuple[PassTraffic, ...]:
    """Return what the passes over every chunk move, in the order a token meets them.

    `activations` says what one chunk of each rank moves of them, where that is known.
    """
    layout, size = run.layout, list_chunk_parameters(run)
    states = _states(run)
    if activations is None:
        activations = _activation_bytes(run)
    whole = [0] * layout.pp
    every = list_chunks(layout, run.model.layers)
    for chunk in every:
        whole[chunk.rank] += size[chunk.position]
    found = {}
    for chunk in every:
        kept, held = activations[chunk.rank], states[chunk.rank]
        share = size[chunk.position] / whole[chunk.rank]
        weights = share * held.parameters if "parameters" in layout.offload else 0.0
        summed = share * held.gradients if "gradients" in layout.offload else 0.0
        before = summed * (1 - 1 / run.num_microbatches)
        found[chunk.position] = PassTraffic(
            HostTraffic(kept, weights), HostTraffic(summed, kept + weights + before)
        )
    return tuple(found[position] for position in range(len(found)))


def update_waits(
    run: TrainingRun,
    stages: tuple[StageTime, ...],
    updated: tuple[float, ...],
    updates: tuple[float, ...],
) -> tuple[float, ...]:
    """Return what each rank waits for transfers between its last backward and its next step.

    `updated` counts the parameters every rank updates, `updates` is how long that takes.
    """
    if run.frozen:
        return (0.0,) * len(stages)  # adapters are small
    layers = [
        max(1, sum(chunk.last - chunk.first for chunk in some))
        for some in list_chunks_by_rank(run.layout, run.model.layers)
    ]
    found = []
    rows = zip(stages, _states(run), updated, updates, layers, strict=True)
    for stage, held, number, update_s, buckets in rows:
        moved = _update_traffic(run, held, number)
        down = transfer_s(run, moved.gradients)
        # Nothing hides the gradients of the layer that backward reaches last.
        late = max(down / buckets, down - stage.backward_s)
        if "gradients" in run.layout.offload:
            late = down / buckets  # they went down with every backward
        found.append(late + max(0.0, transfer_s(run, moved.weights) - update_s))
    return tuple(found)


def _update_traffic(run: TrainingRun, held: StateBytes, number: float) -> HostUpdate:
    """Return what the update of `number` parameters moves."""
    layout = run.layout
    away = set(layout.offload)
    gradients = number * BYTES_PER_ELEMENT[layout.gradient_precision]
    width = 4 if layout.precision == "fp32" or layout.zero == 3 else 2
    # What is gathered from other ranks is whole again on the device.
    gathered = held.parameters if "parameters" in away and 0 < layout.zero < 3 else 0
    if "optimizer" in away:
        fresh = 0.0 if "parameters" in away and not gathered else number * width
        return HostUpdate(
            HostTraffic(to_host_bytes=gradients),
            HostTraffic(to_host_bytes=gathered, to_device_bytes=fresh),
        )
    down = float(held.parameters) if "parameters" in away else 0.0
    up = gradients if "gradients" in away else 0.0
    if layout.zero == 3:
        up += down  # sharded weights are their own master copy
    return HostUpdate(HostTraffic(), HostTraffic(down, up))


def _states(run: TrainingRun) -> tuple[StateBytes, ...]:
    """Return the states of every rank in the formats that `predict.memory` keeps them in.

    Where none of them moves, nobody asks.
    """
    layout, model = run.layout, run.model
    if not {"parameters", "gradients"}.intersection(layout.offload):
        return (StateBytes(0, 0, 0),) * layout.pp
    if run.frozen:
        return tuple(states._replace(gradients=0) for states in stage_state_bytes(layout, model))
    if layout.zero == 3:
        return stage_state_bytes(msgspec.structs.replace(layout, precision="fp32"), model)
    found = stage_state_bytes(layout, model)
    if not stores_fp8_weights(run):
        return found
    ranks = zip(found, count_rank_parameters(layout, model), strict=True)
    return tuple(
        states._replace(parameters=states.parameters - held.matrices - held.experts)
        for states, held in ranks
    )


def _activation_bytes(run: TrainingRun) -> tuple[float, ...]:
    """Return what a microbatch keeps for backward in one chunk of every rank, if it moves."""
    if "activations" not in run.layout.offload:
        return (0.0,) * run.layout.pp
    resident = copy.copy(run)
    resident.layout = msgspec.structs.replace(run.layout, offload=(), offload_layers=None)
    stages = predict_memory(resident).stages
    left = (0,) * len(stages)
    if run.layout.offload_layers is not None:
        left = tuple(stage.activations_bytes for stage in predict_memory(run).stages)
    return tuple(
        (stage.activations_bytes - kept) / stage.in_flight
        for stage, kept in zip(stages, left, strict=True)
    )
