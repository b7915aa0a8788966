"""Collective algorithms as values: moves of chunks between ranks, proved before anyone runs them.

build, ALGORITHMS    the library: rings, trees, hierarchies, exchanges
Builder              write an algorithm of your own
verify               does it do what it promises? A proof, or the shortest counter-example
"""

from typing import TYPE_CHECKING

from meshwright.lazy import lazy_names

if TYPE_CHECKING:
    from meshwright.policy.collective.building import Builder
    from meshwright.policy.collective.collective import Collective, Moves, Op, Shift, Sweep
    from meshwright.policy.collective.library import ALGORITHMS, Algorithm, build
    from meshwright.policy.collective.soundness import Proof, verify

_HOMES = {
    "ALGORITHMS": "meshwright.policy.collective.library",
    "Algorithm": "meshwright.policy.collective.library",
    "Builder": "meshwright.policy.collective.building",
    "Collective": "meshwright.policy.collective.collective",
    "Moves": "meshwright.policy.collective.collective",
    "Op": "meshwright.policy.collective.collective",
    "Proof": "meshwright.policy.collective.soundness",
    "Shift": "meshwright.policy.collective.collective",
    "Sweep": "meshwright.policy.collective.collective",
    "build": "meshwright.policy.collective.library",
    "verify": "meshwright.policy.collective.soundness",
}

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Builder",
    "Collective",
    "Moves",
    "Op",
    "Proof",
    "Shift",
    "Sweep",
    "build",
    "verify",
]

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
