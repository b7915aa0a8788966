"""The policies there are, by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.policy.job_queue import sort_keys
from meshwright.policy.job_queue.job import JobRequest
from meshwright.policy.job_queue.policies.conservative_backfill import ConservativeBackfillPolicy
from meshwright.policy.job_queue.policies.easy_backfill import EasyBackfillPolicy
from meshwright.policy.job_queue.policies.elastic_policy import ElasticPolicy
from meshwright.policy.job_queue.policies.fairness import MaxMinFairnessPolicy
from meshwright.policy.job_queue.policies.least_attained_service import (
    QUEUE_THRESHOLDS_GPU_S,
    LeastAttainedServicePolicy,
)
from meshwright.policy.job_queue.policies.multifactor import MultifactorPolicy, PriorityWeights
from meshwright.policy.job_queue.policies.ordered_queue import GreedyOrderPolicy, StrictOrderPolicy
from meshwright.policy.job_queue.policies.preemption import PreemptivePriorityPolicy
from meshwright.policy.job_queue.policies.preemptive_order import PreemptiveOrderPolicy
from meshwright.policy.job_queue.policies.quota_policy import QuotaPolicy, TeamQuota
from meshwright.policy.job_queue.policy import QueuePolicy
from meshwright.spec.name_suggestions import build_unknown_name_problem


class QueueConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What policies may want to know beside their name."""

    team_shares: Mapping[str, float] = {}
    """Shares of teams, for multifactor."""
    priority_weights: PriorityWeights = PriorityWeights()
    """How much the factors of a priority count."""
    team_quotas: Mapping[str, TeamQuota] = {}
    """Quotas of teams."""
    past_service_gpu_s: Sequence[float] = ()
    """What earlier jobs took in all, for Gittins' index."""
    queue_thresholds_gpu_s: Sequence[float] = QUEUE_THRESHOLDS_GPU_S
    """Service after which jobs sink, for least attained service."""
    backfill_depth: int = 100
    """How many jobs conservative backfill looks at each time."""
    allow_migration: bool = False
    """Whether jobs that are chosen anew may change their place each time."""


class PolicyEntry(NamedTuple):
    """A policy that can be asked for by name."""

    summary: str
    factory: Callable[[QueueConfig], QueuePolicy]
    needs_estimates: bool = False
    """Whether it goes by how long jobs are expected to run."""
    preempts: bool = False
    """Whether it stops jobs for others."""
    needs: str = ""
    """What it goes by, where not every job has it: deadlines or priorities."""


POLICIES: Final[dict[str, PolicyEntry]] = {
    "fifo": PolicyEntry("first come, first served, in strict order", lambda _: StrictOrderPolicy()),
    "fifo-greedy": PolicyEntry(
        "first come, first served; jobs that fit may start out of order",
        lambda _: GreedyOrderPolicy(),
    ),
    "easy": PolicyEntry(
        "FIFO with backfill that never delays the head", lambda _: EasyBackfillPolicy(), True
    ),
    "conservative": PolicyEntry(
        "FIFO with backfill that reserves a start time for every pending job",
        lambda the: ConservativeBackfillPolicy(depth=the.backfill_depth),
        True,
    ),
    "sjf": PolicyEntry(
        "shortest job first", lambda _: GreedyOrderPolicy(sort_keys.by_estimate), True
    ),
    "ssf": PolicyEntry(
        "shortest service (time × GPUs) first",
        lambda _: GreedyOrderPolicy(sort_keys.by_service),
        True,
    ),
    "sjf-backfill": PolicyEntry(
        "shortest job first, with backfill",
        lambda _: EasyBackfillPolicy(sort_keys.by_estimate),
        True,
    ),
    "srtf": PolicyEntry(
        "shortest remaining time first, preemptive",
        lambda the: PreemptiveOrderPolicy(sort_keys.by_remaining_time, moving=the.allow_migration),
        True,
        True,
    ),
    "srsf": PolicyEntry(
        "shortest remaining service first, preemptive",
        lambda the: PreemptiveOrderPolicy(
            sort_keys.by_remaining_service, moving=the.allow_migration
        ),
        True,
        True,
    ),
    "edf": PolicyEntry(
        "earliest deadline first",
        lambda _: GreedyOrderPolicy(sort_keys.by_deadline),
        needs="deadlines",
    ),
    "las": PolicyEntry(
        "least attained service in queues (Tiresias)",
        lambda the: LeastAttainedServicePolicy(
            the.queue_thresholds_gpu_s, moving=the.allow_migration
        ),
        preempts=True,
    ),
    "gittins": PolicyEntry(
        "the same by Gittins' index of earlier jobs",
        lambda the: LeastAttainedServicePolicy(
            the.queue_thresholds_gpu_s,
            past_gpu_s=the.past_service_gpu_s,
            moving=the.allow_migration,
        ),
        preempts=True,
    ),
    "multifactor": PolicyEntry(
        "many factors as Slurm's, with backfill",
        lambda the: MultifactorPolicy(the.team_shares, the.priority_weights),
        True,
    ),
    "priority": PolicyEntry(
        "highest priority first, stopping lower ones",
        lambda _: PreemptivePriorityPolicy(),
        preempts=True,
        needs="priorities",
    ),
    "max-min": PolicyEntry(
        "even progress over kinds of GPU (Gavel)", lambda _: MaxMinFairnessPolicy(), preempts=True
    ),
    "elastic": PolicyEntry(
        "sizes by what a GPU is worth (Pollux)", lambda _: ElasticPolicy(), preempts=True
    ),
    "quota": PolicyEntry(
        "quotas of teams with borrowing (Kueue)",
        lambda the: QuotaPolicy(the.team_quotas),
        preempts=True,
    ),
}


POLICY_ALIASES: Final = {
    "tiresias": "las", "fcfs": "fifo", "backfill": "easy", "gavel": "max-min", "pollux": "elastic",
    "kueue": "quota", "slurm": "multifactor", "deadline": "edf", "spjf": "sjf", "srtf-gpu": "srsf",
    "shortest": "srtf", "shortest-gpu": "srsf", "dlas-gpu": "las", "dlas": "las",
}  # fmt: skip
"""Other names of policies, and of systems that they follow."""
_REMOVED: Final = ("themis", "finish-time", "finish-time-fairness", "ftf")


def build_unknown_policy_problem(name: str, where: str = "policy") -> Problem:
    """Say that there is no policy of a name, and which one is meant."""
    word = name.strip().lower()
    if word in POLICY_ALIASES:
        meant = POLICY_ALIASES[word]
        fix = f"use {meant}: {POLICIES[meant].summary}"
        return Problem(where, f"there is no policy {name!r}", fix)
    if word in _REMOVED:
        what = "there is no policy of finish-time fairness: none met the results of Themis"
        return Problem(where, what, "use max-min for even progress, or las")
    return build_unknown_name_problem("policy", name, list(POLICIES), where)


def list_missing_inputs(name: str, requests: Sequence[JobRequest]) -> list[str]:
    """Return what a policy goes by and no job has, so that it would be another policy."""
    needs = POLICIES[name].needs
    if needs == "deadlines" and all(ask.deadline_s is None for ask in requests):
        return [needs]
    if needs == "priorities" and len({ask.priority for ask in requests}) <= 1:
        return [needs]
    return []


def make_policy(name: str, settings: QueueConfig | None = None) -> QueuePolicy:
    """Return a new policy; each run needs one of its own."""
    if name not in POLICIES:
        raise InputError([build_unknown_policy_problem(name)])
    return POLICIES[name].factory(settings or QueueConfig())
