"""Verifiers: functions that judge answers, each check in a child process with bounds.

    with VerifierPool(["mine.judges:exact"], workers=2) as pool:
        job = VerifierJob(name="exact", verifier="mine.judges:exact", payload={"answer": 3})
        (part,) = pool.verify([job])
        part.value, part.outcome, part.reason

A verifier takes a dict of plain values, and returns a score, or a score and a reason. One that
hangs, floods or dies costs its own check alone: the part says what happened and who it was.
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.run.posttrain.rollout.verifiers.verifier_job import (
        VerifierJob,
        VerifierLimits,
        VerifierStartError,
    )
    from meshwright.run.posttrain.rollout.verifiers.verifier_pool import (
        RunningCheck,
        VerifierPool,
        describe_failures,
    )

_HERE = "meshwright.run.posttrain.rollout.verifiers"
# By name on first use: a verifier that lives beside these must not load them in its child.
_MODULES = {
    "VerifierJob": "meshwright.run.posttrain.rollout.verifiers.verifier_job",
    "RunningCheck": "meshwright.run.posttrain.rollout.verifiers.verifier_pool",
    "VerifierStartError": "meshwright.run.posttrain.rollout.verifiers.verifier_job",
    "VerifierLimits": "meshwright.run.posttrain.rollout.verifiers.verifier_job",
    "VerifierPool": "meshwright.run.posttrain.rollout.verifiers.verifier_pool",
    "describe_failures": "meshwright.run.posttrain.rollout.verifiers.verifier_pool",
}

__all__ = [
    "RunningCheck",
    "VerifierJob",
    "VerifierLimits",
    "VerifierPool",
    "VerifierStartError",
    "describe_failures",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
