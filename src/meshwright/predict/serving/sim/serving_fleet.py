"""`ServingFleet`: replicas of a model that serve together, as a simulation describes them."""

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.serving.router import ROUTING_POLICIES, RoutingPolicy
from meshwright.predict.serving.cost.attention_cost import count_kv_bytes
from meshwright.predict.serving.cost.kv_memory import predict_serving_memory
from meshwright.predict.serving.cost.replica import Replica
from meshwright.predict.serving.cost.step_cost import build_step_cost
from meshwright.predict.serving.sim.served_requests import ServedRequests
from meshwright.predict.serving.sim.simulated_engine import EngineSetup
from meshwright.predict.serving.sim.simulated_kv_transfer import KVTransferTime
from meshwright.predict.serving.sim.simulation import simulate_serving
from meshwright.spec.field_checks import FieldChecker
from meshwright.spec.layout import Layout
from meshwright.spec.model import GatedDeltaNetSpec, Mamba2Spec
from meshwright.spec.scheduler_config import SchedulerConfig
from meshwright.spec.units import format_bytes, format_quantity
from meshwright.spec.workload import WorkloadRequest

TRANSFER_BANDWIDTH_SHARE = 0.6
"""Share of the links' bandwidth at which keys and values move: Mooncake's engine reports 142 of
400 GB/s between two H800 nodes, and 164 of 200 GB/s over four cards."""


class ReplicaPool(msgspec.Struct, frozen=True, kw_only=True):
    """Engines that are alike."""

    replica: Replica
    scheduler_config: SchedulerConfig
    count: int = 1

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.count(count=self.count)
        bounds.raise_problems()

    @property
    def gpus(self) -> int:
        """GPUs of all of them."""
        return self.count * self.replica.gpus


class ServingFleet(msgspec.Struct, frozen=True, kw_only=True):
    """Engines behind a router; some may compute prompts only."""

    serving_pool: ReplicaPool
    """Engines that decode, and compute prompts where no others do."""
    prefill_pool: ReplicaPool | None = None
    routing: RoutingPolicy = "least-loaded"

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.one_of("routing", self.routing, ROUTING_POLICIES)
        before, after = self.prefill_pool, self.serving_pool
        if (
            before is not None
            and before.scheduler_config.block_size != after.scheduler_config.block_size
        ):
            what = (
                f"blocks of {before.scheduler_config.block_size} and "
                f"{after.scheduler_config.block_size} tokens"
            )
            bounds.add("block_size", what, "let both have the same, so that blocks can move")
        bounds.raise_problems()

    @property
    def gpus(self) -> int:
        """GPUs of all engines."""
        return self.serving_pool.gpus + (self.prefill_pool.gpus if self.prefill_pool else 0)

    @property
    def dollars_per_hour(self) -> float | None:
        """What the GPUs cost; None where the cluster has no price."""
        price = self.serving_pool.replica.cluster.price_per_gpu_hour
        return None if price is None else price * self.gpus


def default_scheduler_config(replica: Replica, **given: object) -> SchedulerConfig:
    """Return an engine's own limits, with what is `given` in their place.

    With attention data parallel, each group of GPUs takes as many.
    """
    engine, groups = replica.engine, replica.layout.dp
    fields: dict[str, object] = {
        "max_num_batched_tokens": engine.max_num_batched_tokens * groups,
        "max_num_seqs": engine.max_num_seqs * groups,
        "enable_chunked_prefill": engine.enable_chunked_prefill,
    }
    fields.update({name: value for name, value in given.items() if value is not None})
    if fields.get("max_cudagraph_capture_size"):
        _require_capturing(replica)
    if "max_num_batched_tokens" not in given:
        most = max(int(str(fields["max_num_batched_tokens"])), int(str(fields["max_num_seqs"])))
        fields["max_num_batched_tokens"] = most
    return SchedulerConfig(**fields)  # type: ignore[arg-type]


def _require_capturing(replica: Replica) -> None:
    """Refuse captured steps with prompts where no engine has them, or they would gain nothing."""
    if not replica.engine.launch_s:
        what = f"{replica.engine.name} is not known to launch steps with prompts kernel by kernel"
        raise InputError(
            [Problem("max_cudagraph_capture_size", what, "leave it out, or simulate meshwright")]
        )
    mixers = {type(block.mixer) for block, _ in replica.model.count_layers_by_block()}
    if mixers & {GatedDeltaNetSpec, Mamba2Spec}:
        what = f"{replica.model.name} has recurrent layers, whose steps with prompts are launched"
        raise InputError([Problem("max_cudagraph_capture_size", what, "leave it out")])


def count_kv_blocks(replica: Replica, limits: SchedulerConfig, tokens: float) -> int:
    """Return how many blocks of the KV cache fit, where requests have so many tokens.

    Layers with a window, and recurrent ones, take less for each token of a long request.
    """
    if limits.num_gpu_blocks is not None:
        return limits.num_gpu_blocks
    memory = predict_serving_memory(replica, limits.max_num_batched_tokens)
    each = memory.kv.request_kv_bytes(tokens) / tokens
    groups = replica.layout.dp
    blocks = int(memory.kv_bytes / (each * limits.block_size)) * groups if each > 0 else 1 << 24
    if blocks <= 0:
        needed = format_bytes(memory.weight_bytes + memory.buffer_bytes)
        there = format_bytes(memory.device_bytes)
        what = f"weights and buffers take {needed} of {there}"
        if memory.other_process_bytes:
            what += f" and what others keep there {format_bytes(memory.other_process_bytes)}"
        what += ", and leave no room for requests"
        raise InputError([Problem("memory", what, "use a larger `tp` or `pp`, or fewer bits")])
    return blocks


def simulate_fleet(
    fleet: ServingFleet, requests: list[WorkloadRequest], *, in_flight: int | None = None
) -> ServedRequests:
    """Return how requests fare with a fleet."""
    total = sum(one.prompt_tokens + one.output_tokens for one in requests)
    tokens = max(1.0, total / max(1, len(requests)))
    return simulate_serving(
        requests,
        build_engines(fleet.serving_pool, tokens),
        in_flight=in_flight,
        routing=fleet.routing,
        prefill=build_engines(fleet.prefill_pool, tokens) if fleet.prefill_pool else (),
        transfer=build_kv_transfer_time(fleet) if fleet.prefill_pool else None,
    )


def build_engines(copies: ReplicaPool, tokens: float) -> list[EngineSetup]:
    """Return engines for a simulation, whose requests have so many tokens."""
    replica, limits = copies.replica, copies.scheduler_config
    # Each GPU moves its part of a block over its own link to the host.
    block_bytes = (
        predict_serving_memory(replica).kv.request_kv_bytes(tokens) / tokens * limits.block_size
    )
    station = EngineSetup(
        build_step_cost(replica),
        limits,
        count_kv_blocks(replica, limits, tokens),
        replica.engine.frontend_s,
        replica.engine.frontend_steps,
        block_bytes / (TRANSFER_BANDWIDTH_SHARE * replica.cluster.host.gpu_bytes_per_s),
        async_scheduling=replica.async_scheduling,
        dp_groups=replica.layout.dp,
    )
    return [station] * copies.count


def build_kv_transfer_time(fleet: ServingFleet) -> KVTransferTime:
    """Return how long the keys and values of a prompt travel between two engines.

    All GPUs of the smaller group that has a prompt take part. Engines that lie in one scale-up
    domain use its links, others of one node the way through the host, the rest their network cards.
    """
    assert fleet.prefill_pool is not None, "nothing is handed over"
    before, after = fleet.prefill_pool.replica, fleet.serving_pool.replica
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
        fix = f"use at most {format_quantity(most, 'GPU')} in all"
        raise InputError([Problem("disaggregate", what, fix)])
    # Each GPU of a group that decodes takes its part over its own links. Copies are no further
    # data: who sends has to send what is distinct, in even parts.
    senders = layout.tp * layout.pp
    taken, whole = (
        count_kv_bytes(before.model, each, before.quantization) for each in (after.layout, Layout())
    )

    def seconds(tokens: int) -> float:
        most = max(taken.request_kv_bytes(tokens), whole.request_kv_bytes(tokens) / senders)
        return latency + most / (TRANSFER_BANDWIDTH_SHARE * rate)

    return seconds
