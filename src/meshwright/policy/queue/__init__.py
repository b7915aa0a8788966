"""Which job runs when, and where: queues and placements without a clock.

ask          what a job asks for, and how it stands
pool, nodes  GPUs that are only counted; GPUs of nodes, with `placing`
slices       shares of GPUs, with `scoring` and `fragmentation`
ordered      queues in some order, strict or not; `backfill`
repick       queues that choose anew each time; `attained`, `fairness`
preempting, quotas, fair_share, elastic
policies     all of them by name
"""

from meshwright.policy.queue.ask import Ask, Standing
from meshwright.policy.queue.moves import Moves, Policy
from meshwright.policy.queue.nodes import Node, Nodes, even_nodes
from meshwright.policy.queue.placing import PLACINGS
from meshwright.policy.queue.policies import POLICIES, Settings, make_policy
from meshwright.policy.queue.pool import Counted, Pool
from meshwright.policy.queue.quotas import Quota

__all__ = [
    "PLACINGS",
    "POLICIES",
    "Ask",
    "Counted",
    "Moves",
    "Node",
    "Nodes",
    "Policy",
    "Pool",
    "Quota",
    "Settings",
    "Standing",
    "even_nodes",
    "make_policy",
]
