"""Verifiers: functions that judge answers, each check in a child process with bounds.

    with VerifierPool(["mine.judges:exact"], workers=2) as pool:
        (part,) = pool.judge([Check(name="exact", verifier="mine.judges:exact", job={"answer": 3})])
        part.value, part.outcome, part.reason

A verifier takes a dict of plain values, and returns a score, or a score and a reason. One that
hangs, floods or dies costs its own check alone: the part says what happened and who it was.
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.run.posttrain.rollouts.verifiers.check import (
        Check,
        VerifierBroken,
        VerifierLimits,
    )
    from meshwright.run.posttrain.rollouts.verifiers.pool import UnderWay, VerifierPool, told

_HERE = "meshwright.run.posttrain.rollouts.verifiers"
# By name on first use: a verifier that lives beside these must not load them in its child.
_HOMES = {
    "Check": f"{_HERE}.check",
    "UnderWay": f"{_HERE}.pool",
    "VerifierBroken": f"{_HERE}.check",
    "VerifierLimits": f"{_HERE}.check",
    "VerifierPool": f"{_HERE}.pool",
    "told": f"{_HERE}.pool",
}

__all__ = ["Check", "UnderWay", "VerifierBroken", "VerifierLimits", "VerifierPool", "told"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
