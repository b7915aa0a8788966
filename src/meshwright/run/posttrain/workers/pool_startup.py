"""`start_worker_pool`: workers for a trained decoder, each on its device."""

from collections import Counter
from collections.abc import Callable

import msgspec

from meshwright.policy.rollout import get_engine_memory_fraction
from meshwright.run.nn.decoder import Decoder
from meshwright.run.posttrain.lora import DecoderAdapter
from meshwright.run.posttrain.weight_sync.adapter_slot import collect_adapter_weights
from meshwright.run.posttrain.weight_sync.weight_sender import WeightSender
from meshwright.run.posttrain.weight_sync.weight_tensors import collect_decoder_weights
from meshwright.run.posttrain.workers.ray_cluster import RayWorkerCluster
from meshwright.run.posttrain.workers.worker_config import WorkerConfig
from meshwright.run.posttrain.workers.worker_link import ProcessWorkerLink
from meshwright.run.posttrain.workers.worker_pool import RolloutWorkerPool, WorkerStarter
from meshwright.run.serve.engine.engine_config import EngineConfig
from meshwright.run.serve.worker.protocol import StartEngine
from meshwright.spec.model import Model


def start_worker_pool(
    decoder: Decoder,
    source: str | Model,
    engine: EngineConfig,
    workers: WorkerConfig,
    *,
    threads: int | None,
    stall_timeout_s: float,
    exact: bool,
    say: Callable[[str], object],
    sender: WeightSender | None = None,
    adapter: DecoderAdapter | None = None,
) -> RolloutWorkerPool:
    """Start workers that take a decoder's weights; `engine` is what one beside it would have.

    Where several ranks have the weights, `sender` is what they have. Where an `adapter` beside the
    decoder is trained, workers take its versions, and the decoder's weights once.
    """
    if adapter is not None:
        frozen, learnt = collect_decoder_weights(decoder), adapter.config
        sender = WeightSender(
            [collect_adapter_weights(adapter)], frozen_shards=frozen, lora_config=learnt
        )
    starts = [
        StartEngine(source, each, threads=threads, final_only=True)
        for each in build_worker_engine_configs(engine, workers)
    ]
    # Half of it, so that a worker is replaced before the run is taken to stand still.
    patience_s = stall_timeout_s / 2
    hire: WorkerStarter = lambda number: ProcessWorkerLink(  # noqa: E731
        starts[number], patience_s, stall_timeout_s
    )
    left: Callable[[], object] = lambda: None  # noqa: E731
    if workers.ray_address:
        cluster = RayWorkerCluster(workers, starts, patience_s, stall_timeout_s)
        hire, left = cluster.start_worker, cluster.close
    return RolloutWorkerPool(
        hire,
        workers.num_workers,
        WeightSender([collect_decoder_weights(decoder)]) if sender is None else sender,
        left=left,
        max_restarts=workers.max_restarts,
        stall_timeout_s=stall_timeout_s,
        exact=exact,
        say=say,
    )


def build_worker_engine_configs(engine: EngineConfig, workers: WorkerConfig) -> list[EngineConfig]:
    """Return the settings of each worker's engine: where it runs, and its share of the memory."""
    devices = workers.devices or (engine.device,)
    chosen = [devices[number % len(devices)] for number in range(workers.num_workers)]
    taken = [_ranks(device, workers.tensor_parallel_size) for device in chosen]
    sharing = Counter(device for each in taken for device in each)
    (trainer,) = _ranks(engine.device, 1)

    def share(device: str) -> float:
        # Beside the trainer there may be less than on a device of one's own.
        alone = get_engine_memory_fraction(beside=False, by_turns=False)
        return (engine.gpu_memory_utilization if device == trainer else alone) / sharing[device]

    return [
        msgspec.structs.replace(
            # All ranks of an engine have caches of one size: the fullest device's.
            engine, device=device, tensor_parallel_size=workers.tensor_parallel_size,
            gpu_memory_utilization=min(map(share, ranks))
        )
        for device, ranks in zip(chosen, taken, strict=True)
    ]  # fmt: skip


def _ranks(device: str, tp: int) -> list[str]:
    """Return the devices of an engine's ranks: GPUs are taken in the order of their numbers."""
    kind, _, first = device.partition(":")
    return [f"cuda:{int(first or 0) + rank}" for rank in range(tp)] if kind == "cuda" else [device]
