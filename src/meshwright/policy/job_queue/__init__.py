"""Which job runs when, and where: queues and placements without a clock.

`job` has what a job requests and its state; `pool` has the GPUs to allocate, as a count, on nodes
or in slices; `policies` has the queues, and `policy_registry` all of them by name.
"""

from meshwright.policy.job_queue.job import JobRequest, QueuedJob
from meshwright.policy.job_queue.policies.quota_policy import TeamQuota
from meshwright.policy.job_queue.policy import QueueDecision, QueuePolicy
from meshwright.policy.job_queue.policy_registry import POLICIES, QueueConfig, make_policy
from meshwright.policy.job_queue.pool.node_pool import NodePool, NodeSpec, make_uniform_nodes
from meshwright.policy.job_queue.pool.placement import PLACEMENT_POLICIES
from meshwright.policy.job_queue.pool.pool import CountedPool, GpuPool

__all__ = [
    "PLACEMENT_POLICIES",
    "POLICIES",
    "CountedPool",
    "GpuPool",
    "JobRequest",
    "NodePool",
    "NodeSpec",
    "QueueConfig",
    "QueueDecision",
    "QueuePolicy",
    "QueuedJob",
    "TeamQuota",
    "make_policy",
    "make_uniform_nodes",
]
