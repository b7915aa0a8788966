"""Schedules made for one network: trees that fill its links, however irregular they are.

synthesize         a schedule near the bandwidth bound, or with few rounds
bandwidth_bound    the most any schedule can reach, and the cut that says so
SUPPORTED          the operations that have such schedules
steady_rate        what a schedule reaches, from the bytes it puts on each link
"""

from meshwright.policy.collective.synthesis.bound import SUPPORTED, Bound, bandwidth_bound
from meshwright.policy.collective.synthesis.loads import Loads, steady_rate
from meshwright.policy.collective.synthesis.synthesis import Synthesis, Tree, synthesize

__all__ = [
    "SUPPORTED",
    "Bound",
    "Loads",
    "Synthesis",
    "Tree",
    "bandwidth_bound",
    "steady_rate",
    "synthesize",
]
