"""`Framework`: what a framework of reinforcement learning does beside generating and training.

    plan       slices go from who has them to who needs them, as a run of ours sends them
    gathered   every rank that trains gathers the whole model, tensor by tensor; engines on the same
               GPUs take their part of it, others get all of it from the first rank

Bytes that a framework moves to its host and back are counted here by what they are; how fast the
link takes them, `host_rates` says.
"""

from typing import Literal, NamedTuple

import msgspec

from meshwright.policy.rollout import Dealing
from meshwright.policy.rollout.actions import PhaseName
from meshwright.predict.serving.fleet import TRANSFER_SHARE
from meshwright.spec.cluster import Cluster

Sending = Literal["plan", "gathered"]

_PAGEABLE = 4.5
"""How often as long as pinned memory pageable memory takes: DeepSpeed measured four to five times
on a node of eight GPUs when it changed one for the other (its pull request 5301)."""


class Framework(msgspec.Struct, frozen=True, kw_only=True):
    """Habits that cost time and are no part of the algorithm."""

    name: str
    sending: Sending = "plan"
    fills: bool = False
    """Pipelines pass on microbatches of one size: all are filled up to the fullest one."""
    swaps: bool = False
    """Weights, optimizer and the reference model lie on the host while they are not in use, and all
    of the engines' weights while the trainer works."""
    parks: bool = False
    """The optimizer also leaves for passes without gradients where no engine shares its GPUs."""
    recomputes: bool = True
    """Keys and values of requests that run on are computed anew when new weights come."""
    deals: Dealing = "by-number"
    """Which engine draws a sample."""


MESHWRIGHT = Framework(name="Meshwright")
NEMO_RL = Framework(
    name="NeMo-RL", sending="gathered", fills=True, swaps=True, recomputes=False,
    deals="least-loaded",
)  # fmt: skip
NEMO_RL_04 = msgspec.structs.replace(NEMO_RL, name="NeMo-RL 0.4", parks=True)
"""Until 0.4; since 0.5 the optimizer stays where it has room."""
FRAMEWORKS = {"meshwright": MESHWRIGHT, "nemo-rl": NEMO_RL, "nemo-rl-0.4": NEMO_RL_04}


class HostRates(NamedTuple):
    """Bytes in a second between a GPU and its host, either way."""

    pinned: float
    pageable: float


def host_rates(cluster: Cluster) -> HostRates:
    """Return how fast a GPU's bytes move while all others' do."""
    pinned = TRANSFER_SHARE * cluster.host.gpu_bytes_per_s
    return HostRates(pinned, pinned / _PAGEABLE)


class Moves(NamedTuple):
    """Bytes of the fullest GPU that change sides in a step."""

    weights: float
    """Of the trainer."""
    states: float
    """Of the optimizer."""
    reference: float
    """Weights of a reference model; 0 without one."""
    served: float
    """Weights of an engine."""
    frozen: float = 0.0
    """Of these, what nobody sends again to an engine that has slept, and it reads from its host."""


def phase_s(framework: Framework, moves: Moves, rates: HostRates) -> dict[PhaseName, float]:
    """Return what each memory phase takes, where both sides share GPUs."""
    if not framework.swaps:
        # Gradients end with a step, and engines let go of weights that are old when they wake.
        both = (moves.states + moves.reference) / rates.pinned
        found: dict[PhaseName, float] = {"load": both, "offload": both}
        if moves.frozen:
            found["wake weights"] = moves.frozen / rates.pageable
        return found
    # NeMo-RL keeps buffers for weights (pinned) and none for the optimizer's tensors; gradients
    # are thrown away. vLLM's first level of sleep copies weights out, and back when it wakes.
    trainer = moves.weights / rates.pinned + moves.states / rates.pageable
    engine = moves.served / rates.pinned
    return {"sleep": engine, "load": trainer, "offload": trainer, "wake weights": engine}


def swapped_s(
    framework: Framework, moves: Moves, rates: HostRates, *, forwards: int, shared: bool
) -> float:
    """Return what a step moves within its training: a reference model in the policy's place."""
    if not framework.swaps:
        return 0.0
    # The policy's weights leave, the reference's come, the policy's come back.
    moved = 3 * moves.weights if forwards > 1 else 0.0
    if framework.parks and not shared:
        moved += 2 * moves.states
    return moved / rates.pageable
