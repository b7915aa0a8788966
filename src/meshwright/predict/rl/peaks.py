"""What the fullest GPU holds while engines generate, weights come in and the trainer trains.

What lies there when is `policy.rollout.held`'s, which a run's phases bring about; how many bytes
each of it has is counted here. Frameworks that swap keep nothing of the trainer on a GPU that
generates, and a reference model on the host.

Engines on GPUs of their own take weights as workers do, who read them from their host's memory:
nothing lies aside there. Frameworks that gather have buffers on the GPU.
"""

from collections.abc import Iterable

import msgspec

from meshwright.policy.rollout import Doing, Part, engine_share, held
from meshwright.predict.memory import MemoryPrediction
from meshwright.predict.rl.setup import Setup
from meshwright.predict.serving.fleet import Copies
from meshwright.predict.serving.memory import ServingMemory, serving_memory

GENERATING: Doing = "generating"
SYNCING: Doing = "syncing"
TRAINING: Doing = "training"
_TRAINER: frozenset[Part] = frozenset({"policy", "training", "step"})
_ENGINES: frozenset[Part] = frozenset({"served", "cache", "aside"})


def trainer_bytes(setup: Setup, memory: MemoryPrediction) -> dict[Part, float]:
    """Return what each part of the trainer has on its fullest GPU."""
    worst = memory.worst
    # Which stage is fullest may differ without activations, and all of them generate.
    weights = max(stage.parameters_bytes for stage in memory.stages)
    # Its context never leaves.
    policy = float(weights + worst.runtime_bytes)
    reference = 0 if setup.framework.swaps else reference_bytes(setup, memory)
    training = float(worst.optimizer_bytes + reference)
    return {
        "policy": policy,
        "training": training,
        "step": worst.total_bytes + reference - policy - training,
    }


def reference_bytes(setup: Setup, memory: MemoryPrediction) -> int:
    """Return the weights of a reference model on the trainer's fullest GPU; 0 without one."""
    return memory.worst.parameters_bytes if setup.rounds.has_reference else 0


def engines_of(setup: Setup, trainer: dict[Part, float]) -> Copies:
    """Return the engines with as much of their GPUs as the trainer leaves them."""
    if not setup.shares_gpus or setup.framework.swaps:
        return setup.engines
    replica, by_turns = setup.engines.replica, setup.arrangement.shared
    share = min(replica.engine.memory_share, engine_share(beside=True, by_turns=by_turns))
    taken = _sum(trainer, held(GENERATING, by_turns=by_turns))
    if _is_lent(setup):
        # Weights count once: what the engine is taken to have of its own is the trainer's.
        taken -= min(trainer["policy"], serving_memory(replica).weight_bytes)
    replica = msgspec.structs.replace(
        replica,
        engine=msgspec.structs.replace(replica.engine, memory_share=share),
        taken_bytes=taken,
    )
    return msgspec.structs.replace(setup.engines, replica=replica)


def peaks_of(
    setup: Setup, trainer: dict[Part, float], serving: ServingMemory, aside_bytes: float
) -> dict[str, float]:
    """Return the bytes of the fullest GPU, by what is done."""
    swaps, by_turns = setup.framework.swaps, setup.arrangement.shared
    lies: dict[Part, float] = {
        **trainer,
        "served": 0.0 if _is_lent(setup) else float(serving.weight_bytes),
        "cache": serving.buffer_bytes + max(0.0, serving.kv_bytes),
        "aside": float(aside_bytes),
    }
    there = {
        doing: held(doing, by_turns=by_turns, lent=setup.lent)
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


def _is_lent(setup: Setup) -> bool:
    """Return whether engines have no weights of their own; one in fp8 has its own matrices."""
    own = setup.engines.replica.formats.weights
    return setup.lent and setup.shares_gpus and own == setup.training.precision


def _sum(lies: dict[Part, float], parts: Iterable[Part]) -> float:
    return sum(lies.get(part, 0.0) for part in parts)
