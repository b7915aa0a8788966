"""`fleet_of`: workers for a trained decoder, each on its device."""

from collections import Counter
from collections.abc import Callable

import msgspec

from meshwright.policy.rollout import engine_share
from meshwright.run.nn.decoder import Decoder
from meshwright.run.posttrain.adapters import DecoderAdapter
from meshwright.run.posttrain.weights.adapter_slot import of_adapter
from meshwright.run.posttrain.weights.offered import Offered
from meshwright.run.posttrain.weights.tensors import of_decoder
from meshwright.run.posttrain.workers.fleet import Fleet, Hire
from meshwright.run.posttrain.workers.links import ProcessLink
from meshwright.run.posttrain.workers.ray_workers import Cluster
from meshwright.run.posttrain.workers.settings import WorkerSettings
from meshwright.run.serve.engine.settings import EngineSettings
from meshwright.run.serve.worker.frames import Start
from meshwright.spec.model import Model


def fleet_of(
    decoder: Decoder,
    source: str | Model,
    engine: EngineSettings,
    workers: WorkerSettings,
    *,
    threads: int | None,
    stall_s: float,
    exact: bool,
    say: Callable[[str], object],
    offered: Offered | None = None,
    adapter: DecoderAdapter | None = None,
) -> Fleet:
    """Start workers that take a decoder's weights; `engine` is what one beside it would have.

    Where several ranks have the weights, `offered` is what they have. Where an `adapter` beside the
    decoder is trained, workers take its versions, and the decoder's weights once.
    """
    if adapter is not None:
        frozen, learnt = of_decoder(decoder), adapter.settings
        offered = Offered([of_adapter(adapter)], frozen=frozen, adapter=learnt)
    starts = [
        Start(source, each, threads=threads, whole=True) for each in engines_of(engine, workers)
    ]
    # Half of it, so that a worker is replaced before the run is taken to stand still.
    patience_s = stall_s / 2
    hire: Hire = lambda number: ProcessLink(starts[number], patience_s, stall_s)  # noqa: E731
    left: Callable[[], object] = lambda: None  # noqa: E731
    if workers.ray:
        cluster = Cluster(workers, starts, patience_s, stall_s)
        hire, left = cluster.hire, cluster.close
    return Fleet(
        hire,
        workers.count,
        Offered([of_decoder(decoder)]) if offered is None else offered,
        left=left,
        restarts=workers.restarts,
        stall_s=stall_s,
        exact=exact,
        say=say,
    )


def engines_of(engine: EngineSettings, workers: WorkerSettings) -> list[EngineSettings]:
    """Return the settings of each worker's engine: where it runs, and its share of the memory."""
    devices = workers.devices or (engine.device,)
    chosen = [devices[number % len(devices)] for number in range(workers.count)]
    taken = [_ranks(device, workers.tp) for device in chosen]
    sharing = Counter(device for each in taken for device in each)
    (trainer,) = _ranks(engine.device, 1)

    def share(device: str) -> float:
        # Beside the trainer there may be less than on a device of one's own.
        alone = engine_share(beside=False, by_turns=False)
        return (engine.memory_share if device == trainer else alone) / sharing[device]

    return [
        msgspec.structs.replace(
            # All ranks of an engine have caches of one size: the fullest device's.
            engine, device=device, tp=workers.tp, memory_share=min(map(share, ranks))
        )
        for device, ranks in zip(chosen, taken, strict=True)
    ]  # fmt: skip


def _ranks(device: str, tp: int) -> list[str]:
    """Return the devices of an engine's ranks: GPUs are taken in the order of their numbers."""
    kind, _, first = device.partition(":")
    return [f"cuda:{int(first or 0) + rank}" for rank in range(tp)] if kind == "cuda" else [device]
