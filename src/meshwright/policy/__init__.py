"""Who goes when: decisions as plain values, without torch and without a clock.

    collective  algorithms of collectives: which chunk goes from where to where
    pipeline    the order in which pipeline ranks run forwards, backwards and transfers
    rollout     when to generate with which weights, train and sync in reinforcement learning
    transfer    which slice of which weight goes from a trainer's rank to an engine's
    queue       which job of a cluster runs when, and on which GPUs

The trainer carries these values out; the predictor gives each step of them a duration.
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.policy import collective, pipeline

__all__ = ["collective", "pipeline"]

_HOMES = {
    "collective": "meshwright.policy.collective",
    "pipeline": "meshwright.policy.pipeline",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
