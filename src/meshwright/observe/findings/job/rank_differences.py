"""Patterns of work that differs between ranks, of the fabric and of the pipeline."""

from collections.abc import Iterable

import numpy as np

from meshwright.observe.analyze.collectives.collective_calls import COLLECTIVE_OPS
from meshwright.observe.findings.job.job_context import JobContext
from meshwright.observe.findings.job.job_registry import detects_across_ranks
from meshwright.observe.findings.pattern import CrossRankDetection, Detection, Pattern
from meshwright.observe.findings.text_format import format_duration
from meshwright.timeline.columns import to_numpy
from meshwright.timeline.schema import SPAN_COLUMNS_BY_NAME

LOW_BUS_BANDWIDTH_SHARE = 0.5
"""Collectives that reach less than this part of the expected bandwidth are slow."""
LARGE_BYTES = 1 << 20
"""Below this, latency rules and bandwidth says little."""
IMBALANCE_RATIO = 1.2
MIN_BUBBLE_SHARE = 0.10


@detects_across_ranks(
    Pattern(
        name="low-bus-bandwidth",
        title="Collectives are slower than the fabric",
        family="ranks",
        rule="collectives of 1 MiB and more, of ranks whose devices show that they share a "
        "node, that reach less than half of the bus bandwidth that the cost model expects there",
        cost_basis="measured against the model: the transfer beyond what is expected, as far "
        "as communication is exposed",
        remedy="NCCL_DEBUG=INFO names the transport; nvidia-smi topo -m; NCCL_P2P_LEVEL=NVL, "
        "NCCL_IB_HCA, NCCL_NET_GDR_LEVEL; NCCL_PROTO and NCCL_ALGO unset",
        rocm_remedy="NCCL_DEBUG=INFO names the transport; amd-smi topology; NCCL_IB_HCA, "
        "NCCL_NET_GDR_LEVEL; NCCL_PROTO and NCCL_ALGO unset",
    )
)
def detect_low_bus_bandwidth(job: JobContext) -> Iterable[CrossRankDetection]:
    """Bandwidth against the model's."""
    slow = [
        one
        for one in job.expected_collectives
        if not one.is_fabric_assumed  # Between nodes a profile does not tell what the links can do.
        and one.row.bytes >= LARGE_BYTES
        and one.achieved_share < LOW_BUS_BANDWIDTH_SHARE
        and one.row.num_calls >= 2
    ]
    if not slow:
        return []
    beyond = sum(one.row.transfer_total_ns - one.row.num_calls * one.transfer_ns for one in slow)
    exposed = float(np.mean([one.exposed_communication_ns for one in job.rank_totals]))
    cost = min(float(beyond), exposed)
    evidence = tuple(
        f"{one.row.op} of {one.row.bytes / 2**20:.1f} MiB over {one.row.num_ranks} ranks: "
        f"{one.row.bus_bytes_per_s / 1e9:.0f} GB/s, {one.bus_bytes_per_s / 1e9:.0f} expected"
        for one in slow[:3]
    )
    concerned = {rank for one in slow for rank in one.row.member_ranks}
    ranks = tuple(sorted(concerned & {one.rank for one in job.rank_totals}))
    return [CrossRankDetection(Detection(cost, evidence), ranks, len(ranks))]


@detects_across_ranks(
    Pattern(
        name="all-to-all-imbalance",
        title="All-to-alls carry uneven loads",
        family="ranks",
        rule="ranks of one all-to-all give or get 1.2 times the mean number of bytes",
        cost_basis="estimated: transfer times the part by which the largest load exceeds the mean",
        remedy="balance experts (auxiliary loss, expert capacity_factor, EPLB) or tables "
        "(torchrec planner)",
    )
)
def detect_all_to_all_imbalance(job: JobContext) -> Iterable[CrossRankDetection]:
    """Uneven experts or tables."""
    found = job.collectives
    calls, members = found.calls, found.members
    own = np.flatnonzero(calls.op == COLLECTIVE_OPS.index("all_to_all"))
    if not own.size:
        return []
    sizes = np.full(members.rank.size, -1, dtype=np.int64)
    for part in job.aligned_timeline.split_by_rank():
        mine = members.rank == int(part.ranks[0])
        sizes[mine] = to_numpy(part.spans, SPAN_COLUMNS_BY_NAME["bytes"])[members.row[mine]]
    cost, worst, ranks = 0.0, 1.0, set()
    for at in own.tolist():
        low = int(calls.first_member[at])
        load = sizes[low : low + int(calls.num_members[at])]
        if (load <= 0).any():
            continue
        ratio = float(load.max() / load.mean())
        if ratio >= IMBALANCE_RATIO:
            cost += float(found.transfer_ns[at]) * (1 - 1 / ratio)
            worst = max(worst, ratio)
            ranks.add(int(members.rank[low + int(load.argmax())]))
    if not ranks:
        return []
    evidence = (f"the largest load is up to {worst:.2f} times the mean",)
    return [
        CrossRankDetection(Detection(cost, evidence), tuple(sorted(ranks)), len(job.rank_totals))
    ]


@detects_across_ranks(
    Pattern(
        name="kernel-mismatch",
        title="A rank runs other kernels than its peers",
        family="ranks",
        rule="fewer than half of three or more ranks run a kernel (2 % of compute or more) "
        "that the others do not, and compute longer than the others' median",
        cost_basis="measured: how much longer they compute than the others",
        remedy="compare a rank with its peer (mw diff): other shapes, another library or "
        "autotuning result (torch.backends.cudnn.benchmark, Triton cache), another GPU",
    )
)
def detect_kernel_mismatch(job: JobContext) -> Iterable[CrossRankDetection]:
    """Not the same work or software."""
    if len(job.rank_totals) < 3 or job.pipeline is not None:
        return []
    hits = []
    for one in job.rank_totals:
        peers = [other for other in job.rank_totals if other is not one and other.window_ns]
        usual = float(np.median([other.compute_ns / other.window_ns for other in peers]))
        own = [
            name
            for name, spent in one.kernel_ns.items()
            if spent >= 0.02 * one.compute_ns
            and sum(name in other.kernel_ns for other in peers) < len(peers) / 4
        ]
        more = one.compute_ns - usual * one.window_ns
        if own and more > 0:
            names = ", ".join(name[:60] for name in own[:3])
            evidence = (
                f"rank {one.rank} alone runs {names}",
                f"it computes {format_duration(more)} longer",
            )
            cost = min(more, float(sum(one.kernel_ns[name] for name in own)))
            hits.append(CrossRankDetection(Detection(cost, evidence), (one.rank,), 1))
    return hits if len(hits) < len(job.rank_totals) / 2 else []


@detects_across_ranks(
    Pattern(
        name="pipeline-bubble",
        title="The pipeline's bubble is large",
        family="ranks",
        rule="passes of the pipeline leave 10 % or more of the ranks' time empty",
        cost_basis="measured: the mean bubble of a rank",
        remedy="more micro-batches (four times the stages), interleaved stages or a zero-bubble "
        "schedule (--num-layers-per-virtual-pipeline-stage, torch ScheduleInterleavedZeroBubble)",
        min_cost=0.10,
    )
)
def detect_pipeline_bubble(job: JobContext) -> Iterable[CrossRankDetection]:
    """Empty time of stages."""
    found = job.pipeline
    if found is None or not found.ranks or found.bubble_share < MIN_BUBBLE_SHARE:
        return []
    lost = sum(one.bubble_ns for one in found.ranks) / len(found.ranks)
    stages = found.num_stages
    evidence = (
        f"{100 * found.bubble_share:.0f} % of the passes' time is bubble; schedule "
        f"{found.schedule or 'unknown'}, {stages} stages, {found.num_microbatches} micro-batches",
    )
    low, high = found.window_ns
    few = found.num_microbatches < 4 * stages
    more = f"at least {4 * stages} micro-batches instead of" if few else "more micro-batches than"
    remedy = (
        f"{more} {found.num_microbatches}, or interleaved stages or a zero-bubble schedule "
        + ("(--num-layers-per-virtual-pipeline-stage, torch ScheduleInterleavedZeroBubble)")
    )
    ranks = tuple(one.rank for one in found.ranks)
    return [
        CrossRankDetection(Detection(lost, evidence, ((low, high),), remedy), ranks, len(ranks))
    ]
