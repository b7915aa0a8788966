"""Collectives as MSCCL runs them, thread block by thread block.

LaneProgram     the value: lanes of steps, for every rank
lowered         a collective as a lane program (by way of pieces, events, fusing and waiting)
verify_lanes    is a program sound? A proof, or the shortest counter-example
lifted          the collective that a program carries out, for one that was read from a file
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.policy.collective.threadblocks.lifting import lifted
    from meshwright.policy.collective.threadblocks.lowering import lowered
    from meshwright.policy.collective.threadblocks.program import LaneProgram
    from meshwright.policy.collective.threadblocks.soundness import LaneProof, verify_lanes

_HOMES = {
    "LaneProgram": "meshwright.policy.collective.threadblocks.program",
    "LaneProof": "meshwright.policy.collective.threadblocks.soundness",
    "lifted": "meshwright.policy.collective.threadblocks.lifting",
    "lowered": "meshwright.policy.collective.threadblocks.lowering",
    "verify_lanes": "meshwright.policy.collective.threadblocks.soundness",
}

__all__ = ["LaneProgram", "LaneProof", "lifted", "lowered", "verify_lanes"]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
