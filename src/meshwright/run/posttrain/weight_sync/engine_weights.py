"""`EngineWeightUpdater`: an engine of this process that takes versions of a trainer's weights.

    weights = EngineWeightUpdater([collect_decoder_weights(decoder)], engine, lifecycle)
    weights.update(1)     between turns; what the engine has cached is of version 0, and not found

Where several ranks share the engine's weights it has to be one whose ranks take versions
(`weight_receiver.RECEIVING_RANKS`). Engines of other processes are those of
`run.posttrain.workers`.

Where an adapter is trained, versions are the adapter's alone, for an engine that has room for one
(`trained_lora_slot`) and the weights beside it.
"""

import weakref
from collections.abc import Mapping, Sequence

from meshwright.errors import InputError, Problem
from meshwright.policy.resharding.weight_transfer import (
    BUCKET_BYTES,
    WeightTransferPlan,
    plan_weight_transfer,
)
from meshwright.run.nn.decoder import Decoder
from meshwright.run.nn.sharding.sharded_tensor import ShardedTensor
from meshwright.run.posttrain.lora.lora_config import LoRAConfig
from meshwright.run.posttrain.weight_sync.adapter_slot import AdapterSlot
from meshwright.run.posttrain.weight_sync.in_process_transfer import InProcessTransfer
from meshwright.run.posttrain.weight_sync.weight_buffer import WeightBuffer
from meshwright.run.posttrain.weight_sync.weight_receiver import connect_in_process, receive_version
from meshwright.run.posttrain.weight_sync.weight_sender import WeightSender
from meshwright.run.posttrain.weight_sync.weight_tensors import (
    WeightTarget,
    collect_weight_targets,
    describe_shards,
    get_format_name,
)
from meshwright.run.serve.engine.engine import Engine
from meshwright.run.serve.engine.lifecycle import EngineLifecycle


def collect_engine_targets(engine: Engine) -> dict[str, WeightTarget]:
    """Return where the weights of an engine of one device lie at this moment."""
    if engine.runner.tensor_parallel_size > 1:
        what = "its ranks share its weights, and each takes its own"
        raise InputError(
            [Problem("engine", what, "use a WeightReceiver with ranks=RECEIVING_RANKS")]
        )
    decoder: Decoder = engine.runner.model.decoder
    base = get_format_name("embedding.weight", decoder.embedding.weight)
    return collect_weight_targets(decoder, base=base)


def commit_to_engine(arrivals: WeightBuffer, engine: Engine, lifecycle: EngineLifecycle) -> None:
    """Let an idle engine take a version that has come whole.

    Raises:
        IncompleteVersionError: where it has not; the engine answers with what it has.
        PartialUpdateError: where writing broke off; the engine refuses asks until it has a whole
            version.
    """
    version = arrivals.require_complete()
    arrivals.targets = collect_engine_targets(engine)
    try:
        lifecycle.update_weights_with(version, arrivals.commit)
    finally:
        arrivals.targets = {}


class EngineWeightUpdater:
    """Carries versions from ranks that train to an engine, all in this process."""

    def __init__(
        self,
        sources: Sequence[Mapping[str, ShardedTensor]],
        engine: Engine,
        lifecycle: EngineLifecycle,
        *,
        most_bytes: int = BUCKET_BYTES,
        adapter: LoRAConfig | None = None,
    ) -> None:
        """Carry weights, or an `adapter` of these settings, whose parameters the sources have."""
        self._engine, self._upkeep = engine, lifecycle
        self._slot = None if adapter is None else AdapterSlot(engine.runner, adapter)
        self._carrier: InProcessTransfer | WeightSender
        if engine.runner.tensor_parallel_size > 1:
            self._carrier = WeightSender(sources)
            weakref.finalize(self, self._carrier.close)
            connect_in_process(self._carrier, lifecycle)
            assert self._carrier.plan is not None, "both sides have met"
            self.plan: WeightTransferPlan = self._carrier.plan
            return
        target = (
            collect_engine_targets(engine)
            if self._slot is None
            else self._slot.collect_weight_targets()
        )
        seats = tuple(range(len(sources)))
        self.plan = plan_weight_transfer(
            [describe_shards(each) for each in sources],
            [describe_shards(target)],
            source_seats=seats,
            target_seats=(0,),
        )
        self._carrier = InProcessTransfer(self.plan, sources, [target], most_bytes=most_bytes)
        if self._slot is None:
            self._carrier.buffers[0].targets = {}

    def update(self, version: int) -> None:
        """Bring a version and let the engine take it."""
        if isinstance(self._carrier, WeightSender):
            self._carrier.publish(version)
            receive_version(version, self._engine, self._upkeep)
            self._carrier.release_old_versions(keep=False)
            return
        self._carrier.transfer(version)
        arrivals = self._carrier.buffers[0]
        if self._slot is None:
            commit_to_engine(arrivals, self._engine, self._upkeep)
            return

        def write(slot: AdapterSlot = self._slot) -> None:
            arrivals.commit()
            slot.activate()

        self._upkeep.update_weights_with(arrivals.require_complete(), write)
