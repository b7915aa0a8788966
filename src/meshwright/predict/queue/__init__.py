"""Job queues on a virtual clock: what a policy would have made of a cluster's jobs.

`simulate` drives a policy of `policy.queue`; `outcome_of` turns the run into figures; `pack` fills
a cluster to see how much of it a placement gives away; `predicted` guesses durations from history.
"""

from meshwright.predict.queue.costs import Costs, Drain, Failures
from meshwright.predict.queue.durations import Durations, predicted
from meshwright.predict.queue.outcome import Outcome, outcome_of
from meshwright.predict.queue.packing import SCORERS, pack
from meshwright.predict.queue.replayed import Replayed
from meshwright.predict.queue.simulate import simulate

__all__ = [
    "SCORERS",
    "Costs",
    "Drain",
    "Durations",
    "Failures",
    "Outcome",
    "Replayed",
    "outcome_of",
    "pack",
    "predicted",
    "simulate",
]
