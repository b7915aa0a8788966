"""Which job runs when, and where: queues and placements without a clock.

`ask` is what a job wants and how it stands; `pool`, `nodes` and `slices` are the GPUs to give away,
counted, on nodes or in parts. `ordered`, `backfill`, `repick` and the rest are the queues, and
`policies` has all of them by name.
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
