"""Patterns of ranks that come late to collectives, and of links that are slow."""

from collections.abc import Iterable, Sequence

import numpy as np

from meshwright.observe.analyze.collectives.stragglers import SLOW_KERNEL_RATIO, RankStragglerStats
from meshwright.observe.findings.job.job_context import JobContext
from meshwright.observe.findings.job.job_registry import detects_across_ranks
from meshwright.observe.findings.pattern import CrossRankDetection, Detection, Pattern
from meshwright.observe.findings.text_format import format_duration


def _cause(
    job: JobContext, worst: RankStragglerStats, together: Sequence[int]
) -> tuple[str, str] | None:
    """Why a rank is late: what it has more of than its peers, per step; and in words.

    Whole steps are compared rather than what lies between two collectives: where collectives run
    beside compute, a late rank computes there while its peers wait.
    """
    known = [one for one in job.rank_totals if one.num_steps]
    own = next((one for one in known if one.rank == worst.rank), None)
    peers = [one for one in known if one.rank not in together]
    if own is None or not peers:
        return (worst.cause, "steps are not known") if worst.cause else None

    def more(name: str) -> float:
        usual = np.median([getattr(one, name) / (one.num_steps or 1.0) for one in peers])
        return float(getattr(own, name) / (own.num_steps or 1.0) - usual)

    compute, late, loading = more("compute_ns"), more("late_ns"), more("data_loading_ns")
    if max(compute, late) <= 0:
        return None
    words = (
        f"per step it has {format_duration(max(0.0, compute))} more compute and "
        f"{format_duration(max(0.0, late))} more "
        f"idle time with a late host than the median; its kernels take "
        f"{worst.kernel_slowdown:.3f} times as long as the same ones elsewhere"
    )
    if compute >= late:
        return ("compute" if worst.kernel_slowdown >= SLOW_KERNEL_RATIO else "work"), words
    return ("data" if loading > late / 2 else "host"), words


def _straggler(
    name: str,
    title: str,
    *,
    cause: str,
    detected: str,
    remedy: str,
    serving: str = "",
    rocm: str = "",
) -> None:
    """A pattern of the rank that holds up the others, if it does for this cause."""
    rule = f"one rank, or a few together, are last at most collectives, {detected}"
    cost = "measured: waits of the others for them that no compute hides, mean of a rank"

    @detects_across_ranks(
        Pattern(name, title, "ranks", rule, cost, remedy, serving_remedy=serving, rocm_remedy=rocm)
    )
    def detector(job: JobContext) -> Iterable[CrossRankDetection]:
        found = job.stragglers
        if not found.straggler_ranks or len(job.rank_totals) < 2:
            return []
        worst, late = found.ranks[0], found.straggler_ranks
        told = _cause(job, worst, late)
        if told is None or told[0] != cause:
            return []
        members = job.collectives.members
        own = np.isin(job.collectives.last_rank[members.call_index], late)
        others = len(job.rank_totals) - len(late)
        together = f"ranks {', '.join(map(str, late))} come late together; " if late[1:] else ""
        evidence = (
            f"{together}rank {worst.rank} came last to {worst.num_times_last} of "
            f"{worst.num_collectives} "
            f"collectives; the others waited {format_duration(worst.caused_wait_ns)} together",
            told[1],
        )
        lost = job.lost_ns_in(own & ~np.isin(members.rank, late)) / others
        places = job.late_intervals(worst.rank)
        return [CrossRankDetection(Detection(lost, evidence, places), late, others)]


_straggler(
    "straggler-slow-kernels",
    "One rank's kernels are slower",
    cause="compute",
    detected="and computes longer per step than the median; its kernels take 3 % longer than the "
    "same ones elsewhere",
    remedy="nvidia-smi -q -d PERFORMANCE,CLOCK,ECC -i N on that rank's host (throttling, power "
    "cap, remapped rows); drain the node",
    rocm="amd-smi metric --clock --power --temperature --ecc -g N on that rank's host (throttling, "
    "power cap, errors); drain the node",
)
_straggler(
    "straggler-more-work",
    "One rank has more work",
    cause="work",
    detected="computes longer per step than the median, and its kernels are as fast as elsewhere",
    remedy="balance the work: sequence packing by tokens, even shards of experts, tables or "
    "layers (torchrec planner, uneven stages)",
    serving="balance the work: requests between replicas by tokens, even shards of experts, even "
    "stages",
)
_straggler(
    "straggler-host-bound",
    "One rank's host is slow",
    cause="host",
    detected="and its host launches late for longer than the median, outside the data loader",
    remedy="look at that host: pin processes to cores near the GPU (torchrun --numa-binding="
    "node, numactl), stop other processes, gc.freeze(), cpupower frequency-set -g performance",
)
_straggler(
    "straggler-data-wait",
    "One rank waits for its data",
    cause="data",
    detected="and its host is late in the data loader",
    remedy="DataLoader(num_workers=..., prefetch_factor=4) there; local copies of the data; "
    "even sizes of samples across ranks",
)


@detects_across_ranks(
    Pattern(
        name="rotating-stragglers",
        title="Stragglers change from step to step",
        family="ranks",
        rule="ranks wait for each other, no single one causes half of it",
        cost_basis="measured: waits for the last rank that no compute hides, mean of a rank",
        remedy="even out what differs from step to step: sample lengths (group_by_length, "
        "packing), garbage collection on all ranks at once, CPU noise",
        min_cost=0.03,
    )
)
def detect_rotating_stragglers(job: JobContext) -> Iterable[CrossRankDetection]:
    """Jitter."""
    found = job.stragglers
    if found.pattern != "rotating" or len(job.rank_totals) < 2:
        return []
    total = sum(one.avoidable_wait_ns for one in found.ranks)
    everyone = np.ones(job.lost_ns.size, dtype=np.bool_)
    cost = job.lost_ns_in(everyone) / len(job.rank_totals)
    evidence = (
        f"{format_duration(total)} of waiting for the last rank, shared among "
        + ", ".join(
            f"rank {one.rank}: {format_duration(one.avoidable_wait_ns)}" for one in found.ranks[:4]
        ),
    )
    ranks = tuple(one.rank for one in found.ranks[:4])
    return [CrossRankDetection(Detection(cost, evidence), ranks, len(job.rank_totals))]


@detects_across_ranks(
    Pattern(
        name="slow-link",
        title="Ranks with a slow link",
        family="ranks",
        rule="all groups of a rank transfer 1.25 times as long as like groups without it",
        cost_basis="measured: the transfer that its groups take longer, as far as communication is "
        "exposed; mean of their ranks",
        remedy="nvidia-smi nvlink -s, ibstat, NCCL_DEBUG=INFO on those hosts; check that "
        "NCCL_IB_HCA names all adapters",
        rocm_remedy="amd-smi xgmi, ibstat, NCCL_DEBUG=INFO on those hosts; check that NCCL_IB_HCA "
        "names "
        "all adapters",
    )
)
def detect_slow_link(job: JobContext) -> Iterable[CrossRankDetection]:
    """One link."""
    hits = []
    calls, groups = job.collectives.calls, job.collectives.groups
    exposed = {one.rank: one.exposed_communication_ns for one in job.rank_totals}
    transfer = np.bincount(calls.group, job.collectives.transfer_ns, len(groups))
    for link in job.stragglers.slow_links:
        slow = [at for at, group in enumerate(groups) if set(group.ranks) & set(link.ranks)]
        payers = [[rank for rank in groups[at].ranks if rank in exposed] for at in slow]
        ranks = {rank for own in payers for rank in own}
        if not ranks:
            continue
        spent = sum(transfer[at] * len(own) for at, own in zip(slow, payers, strict=True))
        longer = float(spent) * (1 - 1 / link.slowdown) / len(ranks)
        cost = min(longer, float(np.mean([exposed[rank] for rank in ranks])))
        evidence = (
            f"groups of ranks {', '.join(map(str, link.ranks))} transfer {link.slowdown:.2f} times "
            "as long as like groups",
        )
        hits.append(CrossRankDetection(Detection(cost, evidence), link.ranks, len(ranks)))
    return hits
