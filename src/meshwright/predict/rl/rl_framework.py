"""`RLFramework`: what a framework of reinforcement learning does beside generating and training.

    plan       slices go from who has them to who needs them, as a run of ours sends them
    gathered   every rank that trains gathers the whole model, tensor by tensor; engines on the same
               GPUs take their part of it, others get all of it from the first rank

Bytes that a framework moves to its host and back are counted here by what they are; how fast the
link takes them, `get_host_rates` says.
"""

from typing import Literal, NamedTuple

import msgspec

from meshwright.policy.rollout import AssignmentPolicy
from meshwright.policy.rollout.actions import MemoryPhase
from meshwright.predict.serving.sim.serving_fleet import TRANSFER_BANDWIDTH_SHARE
from meshwright.spec.cluster import Cluster

WeightSyncMethod = Literal["plan", "gathered"]

_PAGEABLE = 4.5
"""How often as long as pinned memory pageable memory takes: DeepSpeed measured four to five times
on a node of eight GPUs when it changed one for the other (its pull request 5301)."""


class RLFramework(msgspec.Struct, frozen=True, kw_only=True):
    """Habits that cost time and are no part of the algorithm."""

    name: str
    sync_method: WeightSyncMethod = "plan"
    pads_microbatches: bool = False
    """Pipelines pass on microbatches of one size: all are filled up to the fullest one."""
    offloads_idle_states: bool = False
    """Weights, optimizer and the reference model lie on the host while they are not in use, and all
    of the engines' weights while the trainer works."""
    offloads_optimizer: bool = False
    """The optimizer also leaves for passes without gradients where no engine shares its GPUs."""
    recomputes_kv_cache: bool = True
    """Keys and values of requests that run on are computed anew when new weights come."""
    sample_assignment: AssignmentPolicy = "by_group"
    """Which engine draws a sample."""


MESHWRIGHT = RLFramework(name="Meshwright")
NEMO_RL = RLFramework(
    name="NeMo-RL",
    sync_method="gathered",
    pads_microbatches=True,
    offloads_idle_states=True,
    recomputes_kv_cache=False,
    sample_assignment="least-loaded",
)
NEMO_RL_04 = msgspec.structs.replace(NEMO_RL, name="NeMo-RL 0.4", offloads_optimizer=True)
"""Until 0.4; since 0.5 the optimizer stays where it has room."""
FRAMEWORKS = {"meshwright": MESHWRIGHT, "nemo-rl": NEMO_RL, "nemo-rl-0.4": NEMO_RL_04}


class HostRates(NamedTuple):
    """Bytes in a second between a GPU and its host, either way."""

    pinned_bytes_per_s: float
    pageable_bytes_per_s: float


def get_host_rates(cluster: Cluster) -> HostRates:
    """Return how fast a GPU's bytes move while all others' do."""
    pinned = TRANSFER_BANDWIDTH_SHARE * cluster.host.gpu_bytes_per_s
    return HostRates(pinned, pinned / _PAGEABLE)


class PhaseTraffic(NamedTuple):
    """Bytes of the fullest GPU that change sides in a step."""

    trainer_weight_bytes: float
    """Of the trainer."""
    optimizer_bytes: float
    """Of the optimizer."""
    reference_bytes: float
    """Weights of a reference model; 0 without one."""
    engine_weight_bytes: float
    """Weights of an engine."""
    frozen_bytes: float = 0.0
    """Of these, what nobody sends again to an engine that has slept, and it reads from its host."""


def memory_phase_s(
    framework: RLFramework, moves: PhaseTraffic, rates: HostRates
) -> dict[MemoryPhase, float]:
    """Return what each memory phase takes, where both sides share GPUs."""
    if not framework.offloads_idle_states:
        # Gradients end with a step, and engines let go of weights that are old when they wake.
        both = (moves.optimizer_bytes + moves.reference_bytes) / rates.pinned_bytes_per_s
        found: dict[MemoryPhase, float] = {"load": both, "offload": both}
        if moves.frozen_bytes:
            found["wake weights"] = moves.frozen_bytes / rates.pageable_bytes_per_s
        return found
    # NeMo-RL keeps buffers for weights (pinned) and none for the optimizer's tensors; gradients
    # are thrown away. vLLM's first level of sleep copies weights out, and back when it wakes.
    trainer = (
        moves.trainer_weight_bytes / rates.pinned_bytes_per_s
        + moves.optimizer_bytes / rates.pageable_bytes_per_s
    )
    engine = moves.engine_weight_bytes / rates.pinned_bytes_per_s
    return {"sleep": engine, "load": trainer, "offload": trainer, "wake weights": engine}


def reference_swap_s(
    framework: RLFramework, moves: PhaseTraffic, rates: HostRates, *, forwards: int, shared: bool
) -> float:
    """Return what a step moves within its training: a reference model in the policy's place."""
    if not framework.offloads_idle_states:
        return 0.0
    # The policy's weights leave, the reference's come, the policy's come back.
    moved = 3 * moves.trainer_weight_bytes if forwards > 1 else 0.0
    if framework.offloads_optimizer and not shared:
        moved += 2 * moves.optimizer_bytes
    return moved / rates.pageable_bytes_per_s
