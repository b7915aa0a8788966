"""`Fleet`: copies of a model that serve together, and what a simulation needs to know of them."""

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.routing import ROUTINGS, Routing
from meshwright.predict.serving.clocked import Station
from meshwright.predict.serving.contexts import kv_sizes
from meshwright.predict.serving.handover import Transfer
from meshwright.predict.serving.memory import serving_memory
from meshwright.predict.serving.replica import Replica
from meshwright.predict.serving.served import Served
from meshwright.predict.serving.simulate import simulate
from meshwright.predict.serving.step_cost import step_cost
from meshwright.spec.bounds import Bounds
from meshwright.spec.layout import Layout
from meshwright.spec.model import GatedDelta, Mamba2
from meshwright.spec.serving import Limits
from meshwright.spec.units import format_bytes, format_some
from meshwright.spec.workload import Request

TRANSFER_SHARE = 0.6
"""Share of the links' bandwidth at which keys and values move: Mooncake's engine reports 142 of
400 GB/s between two H800 nodes, and 164 of 200 GB/s over four cards."""


class Copies(msgspec.Struct, frozen=True, kw_only=True):
    """Engines that are alike."""

    replica: Replica
    limits: Limits
    count: int = 1

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.count(count=self.count)
        bounds.require()

    @property
    def gpus(self) -> int:
        """GPUs of all of them."""
        return self.count * self.replica.gpus


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """Engines behind a router; some may compute prompts only."""

    serving: Copies
    """Engines that decode, and compute prompts where no others do."""
    prefill: Copies | None = None
    routing: Routing = "least-loaded"

    def __post_init__(self) -> None:
        bounds = Bounds()
        bounds.one_of("routing", self.routing, ROUTINGS)
        before, after = self.prefill, self.serving
        if before is not None and before.limits.block_tokens != after.limits.block_tokens:
            what = f"blocks of {before.limits.block_tokens} and {after.limits.block_tokens} tokens"
            bounds.add("block_tokens", what, "let both have the same, so that blocks can move")
        bounds.require()

    @property
    def gpus(self) -> int:
        """GPUs of all engines."""
        return self.serving.gpus + (self.prefill.gpus if self.prefill else 0)

    @property
    def dollars_per_hour(self) -> float | None:
        """What the GPUs cost; None where the cluster has no price."""
        price = self.serving.replica.cluster.price_per_gpu_hour
        return None if price is None else price * self.gpus


def default_limits(replica: Replica, **given: object) -> Limits:
    """Return an engine's own limits, with what is `given` in their place.

    With attention data parallel, each group of GPUs takes as many.
    """
    engine, groups = replica.engine, replica.layout.dp
    fields: dict[str, object] = {
        "batch_tokens": engine.batch_tokens * groups,
        "batch_requests": engine.batch_requests * groups,
        "mixing": engine.mixing,
    }
    fields.update({name: value for name, value in given.items() if value is not None})
    if fields.get("graph_tokens"):
        _require_capturing(replica)
    if "batch_tokens" not in given:
        most = max(int(str(fields["batch_tokens"])), int(str(fields["batch_requests"])))
        fields["batch_tokens"] = most
    return Limits(**fields)  # type: ignore[arg-type]


def _require_capturing(replica: Replica) -> None:
    """Refuse captured steps with prompts where no engine has them, or they would gain nothing."""
    if not replica.engine.launch_s:
        what = f"{replica.engine.name} is not known to launch steps with prompts kernel by kernel"
        raise InputError([Problem("graph_tokens", what, "leave it out, or simulate meshwright")])
    mixers = {type(block.mixer) for block, _ in replica.model.block_counts()}
    if mixers & {GatedDelta, Mamba2}:
        what = f"{replica.model.name} has recurrent layers, whose steps with prompts are launched"
        raise InputError([Problem("graph_tokens", what, "leave it out")])


def blocks_of(replica: Replica, limits: Limits, tokens: float) -> int:
    """Return how many blocks of the KV cache fit, where requests have so many tokens.

    Layers with a window, and recurrent ones, take less for each token of a long request.
    """
    if limits.kv_blocks is not None:
        return limits.kv_blocks
    memory = serving_memory(replica, limits.batch_tokens)
    each = memory.kv.bytes_of(tokens) / tokens
    groups = replica.layout.dp
    blocks = int(memory.kv_bytes / (each * limits.block_tokens)) * groups if each > 0 else 1 << 24
    if blocks <= 0:
        needed = format_bytes(memory.weight_bytes + memory.buffer_bytes)
        there = format_bytes(memory.device_bytes)
        what = f"weights and buffers take {needed} of {there}"
        if memory.taken_bytes:
            what += f" and what others keep there {format_bytes(memory.taken_bytes)}"
        what += ", and leave no room for requests"
        raise InputError([Problem("memory", what, "use a larger `tp` or `pp`, or fewer bits")])
    return blocks


def run_fleet(fleet: Fleet, requests: list[Request], *, in_flight: int | None = None) -> Served:
    """Return how requests fare with a fleet."""
    total = sum(one.prompt_tokens + one.output_tokens for one in requests)
    tokens = max(1.0, total / max(1, len(requests)))
    return simulate(
        requests,
        stations_of(fleet.serving, tokens),
        in_flight=in_flight,
        routing=fleet.routing,
        prefill=stations_of(fleet.prefill, tokens) if fleet.prefill else (),
        transfer=transfer_of(fleet) if fleet.prefill else None,
    )


def stations_of(copies: Copies, tokens: float) -> list[Station]:
    """Return engines for a simulation, whose requests have so many tokens."""
    replica, limits = copies.replica, copies.limits
    # Each GPU moves its part of a block over its own link to the host.
    block_bytes = serving_memory(replica).kv.bytes_of(tokens) / tokens * limits.block_tokens
    station = Station(
        step_cost(replica),
        limits,
        blocks_of(replica, limits, tokens),
        replica.engine.arrival_s,
        replica.engine.arrival_steps,
        block_bytes / (TRANSFER_SHARE * replica.cluster.host.gpu_bytes_per_s),
        ahead=replica.works_ahead,
        groups=replica.layout.dp,
    )
    return [station] * copies.count


def transfer_of(fleet: Fleet) -> Transfer:
    """Return how long the keys and values of a prompt travel between two engines.

    All GPUs of the smaller group that has a prompt take part. Engines that lie in one scale-up
    domain use its links, others of one node the way through the host, the rest their network cards.
    """
    assert fleet.prefill is not None, "nothing is handed over"
    before, after = fleet.prefill.replica, fleet.serving.replica
    cluster, layout = before.cluster, before.layout
    if fleet.gpus <= cluster.scale_up.gpus:
        rate, latency = cluster.scale_up.gpu_bytes_per_s, cluster.scale_up.latency_s
    elif fleet.gpus <= cluster.gpus_per_node:
        rate = cluster.bandwidth_between(0, fleet.gpus - 1)
        latency = cluster.latency_between(0, fleet.gpus - 1)
    else:
        rate = min(cluster.nic_bytes_per_s_per_gpu, cluster.host.gpu_bytes_per_s)
        latency = 0.0 if cluster.nics is None else cluster.nics.latency_s
    if rate <= 0:
        what = f"{cluster.name} has no network between its nodes"
        most = max(cluster.scale_up.gpus, cluster.gpus_per_node)
        fix = f"use at most {format_some(most, 'GPU')} in all"
        raise InputError([Problem("disaggregate", what, fix)])
    # Each GPU of a group that decodes takes its part over its own links. Copies are no further
    # data: who sends has to send what is distinct, in even parts.
    senders = layout.tp * layout.pp
    taken, whole = (
        kv_sizes(before.model, each, before.formats) for each in (after.layout, Layout())
    )

    def seconds(tokens: int) -> float:
        most = max(taken.bytes_of(tokens), whole.bytes_of(tokens) / senders)
        return latency + most / (TRANSFER_SHARE * rate)

    return seconds
