"""The policies there are, by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from meshwright.errors import InputError
from meshwright.policy.queue import orders
from meshwright.policy.queue.attained import LIMITS_GPU_S, Attained
from meshwright.policy.queue.backfill import Easy
from meshwright.policy.queue.conservative import Conservative
from meshwright.policy.queue.elastic import Elastic
from meshwright.policy.queue.fair_share import FairShare, Weights
from meshwright.policy.queue.fairness import FinishTime, Shares
from meshwright.policy.queue.moves import Policy
from meshwright.policy.queue.ordered import Skipping, Strict
from meshwright.policy.queue.preempting import Preempting
from meshwright.policy.queue.quotas import Quota, Quotas
from meshwright.policy.queue.repick import Repick
from meshwright.spec.names import unknown_name


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What policies may want to know beside their name."""

    shares: Mapping[str, float] = {}
    """Shares of teams, for fair-share."""
    weights: Weights = Weights()
    """How much the factors of a priority count."""
    quotas: Mapping[str, Quota] = {}
    """Quotas of teams."""
    past_gpu_s: Sequence[float] = ()
    """What earlier jobs took in all, for Gittins' index."""
    limits_gpu_s: Sequence[float] = LIMITS_GPU_S
    """Service after which jobs sink, for least attained service."""
    depth: int = 100
    """How many jobs conservative backfill looks at each time."""
    moving: bool = False
    """Whether jobs that are chosen anew may change their place each time."""


class Named(NamedTuple):
    """A policy that can be asked for by name."""

    summary: str
    make: Callable[[Settings], Policy]
    estimates: bool = False
    """Whether it goes by how long jobs are expected to run."""
    stops: bool = False
    """Whether it stops jobs for others."""


POLICIES: Final[dict[str, Named]] = {
    "fifo": Named("first come, first served; nobody passes", lambda _: Strict()),
    "fifo-skip": Named("first come, first served; whoever fits may pass", lambda _: Skipping()),
    "easy": Named("FIFO with backfill that never delays the head", lambda _: Easy(), True),
    "conservative": Named(
        "FIFO with backfill that delays nobody",
        lambda the: Conservative(depth=the.depth),
        True,
    ),
    "sjf": Named("shortest job first", lambda _: Skipping(orders.by_estimate), True),
    "ssf": Named(
        "shortest service (time × GPUs) first", lambda _: Skipping(orders.by_service), True
    ),
    "sjf-easy": Named(
        "shortest job first, with backfill",
        lambda _: Easy(orders.by_estimate),
        True,
    ),
    "srtf": Named(
        "shortest remaining time first, preemptive",
        lambda the: Repick(orders.by_time_left, moving=the.moving),
        True,
        True,
    ),
    "srsf": Named(
        "shortest remaining service first, preemptive",
        lambda the: Repick(orders.by_service_left, moving=the.moving),
        True,
        True,
    ),
    "edf": Named("earliest deadline first", lambda _: Skipping(orders.by_deadline)),
    "las": Named(
        "least attained service in queues (Tiresias)",
        lambda the: Attained(the.limits_gpu_s, moving=the.moving),
        stops=True,
    ),
    "gittins": Named(
        "the same by Gittins' index of earlier jobs",
        lambda the: Attained(the.limits_gpu_s, past_gpu_s=the.past_gpu_s, moving=the.moving),
        stops=True,
    ),
    "fair-share": Named(
        "many factors as Slurm's, with backfill",
        lambda the: FairShare(the.shares, the.weights),
        True,
    ),
    "priority": Named(
        "highest priority first, stopping lower ones", lambda _: Preempting(), stops=True
    ),
    "finish-time": Named(
        "worst finish-time ratio first (Themis)", lambda _: FinishTime(), True, True
    ),
    "shares": Named("even progress over kinds of GPU (Gavel)", lambda _: Shares(), stops=True),
    "elastic": Named("sizes by what a GPU is worth (Pollux)", lambda _: Elastic(), stops=True),
    "quotas": Named(
        "quotas of teams with borrowing (Kueue)", lambda the: Quotas(the.quotas), stops=True
    ),
}


def make_policy(name: str, settings: Settings | None = None) -> Policy:
    """Return a new policy; each run needs one of its own."""
    if name not in POLICIES:
        raise InputError([unknown_name("policy", name, list(POLICIES), "policy")])
    return POLICIES[name].make(settings or Settings())
