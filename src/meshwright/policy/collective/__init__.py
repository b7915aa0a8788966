"""Collective algorithms as values: moves of chunks between ranks, proved before anyone runs them.

build_algorithm, ALGORITHMS   the library: rings, trees, hierarchies, exchanges
CollectiveBuilder             writes an algorithm of your own
verify_collective             proves that it keeps its contract, or gives a counter-example
"""

from typing import TYPE_CHECKING

from meshwright.lazy_imports import make_lazy_getattr

if TYPE_CHECKING:
    from meshwright.policy.collective.algorithms.library import (
        ALGORITHMS,
        AlgorithmInfo,
        build_algorithm,
    )
    from meshwright.policy.collective.builder import CollectiveBuilder
    from meshwright.policy.collective.collective import (
        ChunkMoves,
        Collective,
        CollectiveOp,
        Sweep,
        SweepShift,
    )
    from meshwright.policy.collective.verification.verifier import (
        CollectiveProof,
        verify_collective,
    )

_MODULES = {
    "ALGORITHMS": "meshwright.policy.collective.algorithms.library",
    "AlgorithmInfo": "meshwright.policy.collective.algorithms.library",
    "CollectiveBuilder": "meshwright.policy.collective.builder",
    "Collective": "meshwright.policy.collective.collective",
    "ChunkMoves": "meshwright.policy.collective.collective",
    "CollectiveOp": "meshwright.policy.collective.collective",
    "CollectiveProof": "meshwright.policy.collective.verification.verifier",
    "SweepShift": "meshwright.policy.collective.collective",
    "Sweep": "meshwright.policy.collective.collective",
    "build_algorithm": "meshwright.policy.collective.algorithms.library",
    "verify_collective": "meshwright.policy.collective.verification.verifier",
}

__all__ = [
    "ALGORITHMS",
    "AlgorithmInfo",
    "ChunkMoves",
    "Collective",
    "CollectiveBuilder",
    "CollectiveOp",
    "CollectiveProof",
    "Sweep",
    "SweepShift",
    "build_algorithm",
    "verify_collective",
]

__getattr__, __dir__ = make_lazy_getattr(__name__, _MODULES)
