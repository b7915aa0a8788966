"""Schedules made for one network: trees that fill its links, however irregular they are.

synthesize             a schedule near the bandwidth bound, or with few rounds
find_bandwidth_bound   the most any schedule can reach, and the cut that limits it
SUPPORTED_OPS          the operations that have such schedules
compute_steady_loads   the bytes that a schedule puts on each link, and the rate it reaches
"""

from meshwright.policy.collective.synthesis.bandwidth_bound import (
    SUPPORTED_OPS,
    BandwidthBound,
    find_bandwidth_bound,
)
from meshwright.policy.collective.synthesis.link_loads import SteadyLinkLoads, compute_steady_loads
from meshwright.policy.collective.synthesis.synthesis import (
    SynthesizedCollective,
    WeightedTree,
    synthesize,
)

__all__ = [
    "SUPPORTED_OPS",
    "BandwidthBound",
    "SteadyLinkLoads",
    "SynthesizedCollective",
    "WeightedTree",
    "compute_steady_loads",
    "find_bandwidth_bound",
    "synthesize",
]
