"""Collectives as MSCCL runs them, thread block by thread block.

ThreadBlockProgram   the value: the steps of every thread block, for every rank
lower_collective     a collective as a thread block program (messages, events, fusion, dependencies)
verify_program       is a program correct? A proof, or the shortest counter-example
lift_program         the collective that a program carries out, for one that was read from a file
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.policy.collective.msccl.lifting import lift_program
    from meshwright.policy.collective.msccl.lowering import lower_collective
    from meshwright.policy.collective.msccl.program_verification import ProgramProof, verify_program
    from meshwright.policy.collective.msccl.thread_block_program import ThreadBlockProgram

_MODULES = {
    "ThreadBlockProgram": "meshwright.policy.collective.msccl.thread_block_program",
    "ProgramProof": "meshwright.policy.collective.msccl.program_verification",
    "lift_program": "meshwright.policy.collective.msccl.lifting",
    "lower_collective": "meshwright.policy.collective.msccl.lowering",
    "verify_program": "meshwright.policy.collective.msccl.program_verification",
}

__all__ = [
    "ProgramProof",
    "ThreadBlockProgram",
    "lift_program",
    "lower_collective",
    "verify_program",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
