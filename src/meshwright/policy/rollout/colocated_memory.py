"""What lies on GPUs that trainer and engines share, and how much of one an engine may fill.

Phases move memory; what lies there while something is done follows from those before it, here and
nowhere else. A run carries the phases out, a simulation counts the bytes of what they leave.

    doing        by turns                                   each side keeps its memory
    generating   policy, served, cache                      policy, training, served, cache
    training     policy, training, step                     the same, and step
    syncing      policy, served, aside                      the same, and aside

An engine that is lent the trainer's weights gives none up: `served` is then what it has in a format
of its own, if anything.
"""

from typing import Literal

from meshwright.policy.rollout.actions import AFTER_SYNC, BEFORE_SYNC, BEFORE_TRAINING, MemoryPhase

MemoryRegion = Literal["policy", "training", "step", "served", "cache", "aside"]
"""`policy`: the trainer's weights, which syncs read. `training`: what else a step begins with: the
optimizer's states, a reference model, a critic. `step`: gradients and activations, which end with
it. `served`: an engine's weights. `cache`: its keys and values, and what its steps need. `aside`: a
version of weights that comes in, until all of it is there."""
ColocatedPhase = Literal["generating", "syncing", "training"]

_MOVED: dict[MemoryPhase, tuple[frozenset[MemoryRegion], frozenset[MemoryRegion]]] = {
    "sleep": (frozenset({"served", "cache"}), frozenset()),
    "load": (frozenset(), frozenset({"training"})),
    "offload": (frozenset({"training"}), frozenset()),
    "wake weights": (frozenset(), frozenset({"served"})),
    "wake cache": (frozenset(), frozenset({"cache"})),
}
"""What leaves a GPU with a phase, and what comes."""
_ALWAYS: frozenset[MemoryRegion] = frozenset({"policy", "training", "served", "cache"})
_MEANWHILE: dict[ColocatedPhase, frozenset[MemoryRegion]] = {
    "generating": frozenset(),
    "training": frozenset({"step"}),
    "syncing": frozenset({"aside"}),
}
_ROUND: tuple[tuple[ColocatedPhase, tuple[MemoryPhase, ...]], ...] = (
    ("training", BEFORE_TRAINING),
    ("syncing", BEFORE_SYNC),
    ("generating", AFTER_SYNC),
)
"""What comes before each, in the order of a step."""

_ALONE, _BESIDE = 0.9, 0.5
"""The rest of a GPU is left to libraries, and beside a trainer also to its steps."""


def shares_weights(*, adapted: bool, one_process: bool) -> bool:
    """Return whether an engine uses the trainer's weights where they lie.

    Nobody changes those beside an adapter, so one of the trainer's process needs none of its own.
    """
    return adapted and one_process


def list_resident_regions(
    doing: ColocatedPhase, *, by_turns: bool, lent: bool = False
) -> frozenset[MemoryRegion]:
    """Return what lies on a GPU of both sides while something is done.

    `lent` says that engines use the trainer's weights.
    """
    if not by_turns:
        return _ALWAYS | _MEANWHILE[doing]
    lies = _ALWAYS
    stays: frozenset[MemoryRegion] = frozenset({"served"} if lent else ())
    for name, phases in _ROUND:
        for phase in phases:
            leaves, comes = _MOVED[phase]
            lies = (lies - (leaves - stays)) | comes
        if name == doing:
            break
    return lies | _MEANWHILE[doing]


def get_engine_memory_fraction(*, beside: bool, by_turns: bool) -> float:
    """Return which share of a GPU may be full while engines generate.

    All that lies there meanwhile counts, also of a trainer `beside` them; where it takes its steps
    there without taking turns, these need the other half.
    """
    return _BESIDE if beside and not by_turns else _ALONE
