"""Decisions as plain values, without torch and without a clock.

    collective   algorithms of collectives: which chunk goes from which rank to which
    pipeline     the order in which pipeline ranks run forwards, backwards and transfers
    rollout      when to generate with which weights, train and sync in reinforcement learning
    resharding   which slice of which weight goes from a trainer's rank to an engine's
    serving      which requests an engine batches, caches and preempts
    job_queue    which job of a cluster runs when, and on which GPUs

`run` executes these values; `predict` gives each step of them a duration.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.policy import collective, pipeline

__all__ = ["collective", "pipeline"]

_MODULES = {
    "collective": "meshwright.policy.collective",
    "pipeline": "meshwright.policy.pipeline",
}

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
