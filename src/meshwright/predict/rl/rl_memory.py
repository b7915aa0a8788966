"""What the fullest GPU holds while engines generate, weights come in and the trainer trains.

What lies there when is `policy.rollout.colocated_memory`'s, which a run's phases bring about; how
many bytes each of it has is counted here. Frameworks that swap keep nothing of the trainer on a GPU
that generates, and a reference model on the host.

Engines on GPUs of their own take weights as workers do, who read them from their host's memory:
nothing lies aside there. Frameworks that gather have buffers on the GPU.
"""

from collections.abc import Iterable

import msgspec

from meshwright.policy.rollout import (
    ColocatedPhase,
    MemoryRegion,
    get_engine_memory_fraction,
    list_resident_regions,
)
from meshwright.predict.memory.memory_prediction import MemoryPrediction
from meshwright.predict.rl.rl_setup import RLSetup
from meshwright.predict.serving.cost.kv_memory import ServingMemory, predict_serving_memory
from meshwright.predict.serving.sim.serving_fleet import ReplicaPool

GENERATING: ColocatedPhase = "generating"
SYNCING: ColocatedPhase = "syncing"
TRAINING: ColocatedPhase = "training"
_TRAINER: frozenset[MemoryRegion] = frozenset({"policy", "training", "step"})
_ENGINES: frozenset[MemoryRegion] = frozenset({"served", "cache", "aside"})


def trainer_bytes(setup: RLSetup, memory: MemoryPrediction) -> dict[MemoryRegion, float]:
    """Return what each part of the trainer has on its fullest GPU."""
    worst = memory.worst_stage
    # Which stage is fullest may differ without activations, and all of them generate.
    weights = max(stage.parameters_bytes for stage in memory.stages)
    # Its context never leaves.
    policy = float(weights + worst.runtime_bytes)
    reference = 0 if setup.framework.offloads_idle_states else reference_bytes(setup, memory)
    training = float(worst.optimizer_bytes + reference)
    return {
        "policy": policy,
        "training": training,
        "step": worst.total_bytes + reference - policy - training,
    }


def reference_bytes(setup: RLSetup, memory: MemoryPrediction) -> int:
    """Return the weights of a reference model on the trainer's fullest GPU; 0 without one."""
    return memory.worst_stage.parameters_bytes if setup.rollout_batch.has_reference else 0


def fit_engines(setup: RLSetup, trainer: dict[MemoryRegion, float]) -> ReplicaPool:
    """Return the engines with as much of their GPUs as the trainer leaves them."""
    if not setup.shares_gpus or setup.framework.offloads_idle_states:
        return setup.rollout_pool
    replica, by_turns = setup.rollout_pool.replica, setup.rollout_policy.colocated
    share = min(
        replica.engine.gpu_memory_utilization,
        get_engine_memory_fraction(beside=True, by_turns=by_turns),
    )
    taken = _sum(trainer, list_resident_regions(GENERATING, by_turns=by_turns))
    if _is_lent(setup):
        # Weights count once: what the engine is taken to have of its own is the trainer's.
        taken -= min(trainer["policy"], predict_serving_memory(replica).weight_bytes)
    replica = msgspec.structs.replace(
        replica,
        engine=msgspec.structs.replace(replica.engine, gpu_memory_utilization=share),
        other_process_bytes=taken,
    )
    return msgspec.structs.replace(setup.rollout_pool, replica=replica)


def predict_peak_bytes(
    setup: RLSetup, trainer: dict[MemoryRegion, float], serving: ServingMemory, aside_bytes: float
) -> dict[str, float]:
    """Return the bytes of the fullest GPU, by what is done."""
    swaps, by_turns = setup.framework.offloads_idle_states, setup.rollout_policy.colocated
    lies: dict[MemoryRegion, float] = {
        **trainer,
        "served": 0.0 if _is_lent(setup) else float(serving.weight_bytes),
        "cache": serving.buffer_bytes + max(0.0, serving.kv_bytes),
        "aside": float(aside_bytes),
    }
    there = {
        doing: list_resident_regions(doing, by_turns=by_turns, lent=setup.shares_trainer_weights)
        for doing in (GENERATING, SYNCING, TRAINING)
    }
    if setup.shares_gpus:
        if swaps:
            there[GENERATING] -= _TRAINER
        return {doing: _sum(lies, parts) for doing, parts in there.items()}
    if not swaps:
        lies["aside"] = 0.0
    return {
        GENERATING: _sum(lies, there[GENERATING] & _ENGINES),
        SYNCING: max(_sum(lies, there[SYNCING] & side) for side in (_TRAINER, _ENGINES)),
        TRAINING: _sum(lies, there[TRAINING] & _TRAINER),
    }


def _is_lent(setup: RLSetup) -> bool:
    """Return whether engines have no weights of their own; one in fp8 has its own matrices."""
    own = setup.rollout_pool.replica.quantization.weights
    return (
        setup.shares_trainer_weights and setup.shares_gpus and own == setup.trainer_layout.precision
    )


def _sum(lies: dict[MemoryRegion, float], parts: Iterable[MemoryRegion]) -> float:
    return sum(lies.get(part, 0.0) for part in parts)
