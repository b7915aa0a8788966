"""Patterns of communication that one rank shows."""

import numpy as np

from meshwright.observe.analyze.spans.intervals import (
    COMMUNICATION,
    COMPUTE,
    Flags,
    measure_covered_ns,
    measure_total_ns,
)
from meshwright.observe.findings.job.evidence_format import (
    format_per_step,
    select_longest_device_spans,
)
from meshwright.observe.findings.job.job_registry import detects_on_rank
from meshwright.observe.findings.job.rank_context import RankContext
from meshwright.observe.findings.pattern import Detection, Pattern
from meshwright.observe.findings.text_format import format_duration, format_share
from meshwright.timeline.readers.parsing.communication_names import (
    match_communication_rule,
    parse_kernel_dtype,
)

SMALL_BYTES = 1 << 20
MIN_SMALL_COLLECTIVES = 20
"""Collectives per step, of 1 MiB or less."""
MIN_UNSIZED_COLLECTIVES = 100
"""Collectives per step, where the trace says no sizes."""
CONTENTION_SLOWDOWN = 1.10
"""Kernels beside communication take so many times as long as alone."""


def _of_kind(rank: RankContext, *wanted: str) -> Flags:
    own, kinds = rank.communication_spans
    found = np.zeros(rank.duration_ns.size, dtype=np.bool_)
    found[own[np.array([kind in wanted for kind in kinds], dtype=np.bool_)]] = True
    return found


def _exposed(rank: RankContext, own: Flags, what: str) -> Detection | None:
    """Collectives that nothing hides; none where nothing computes, as in a test of links."""
    if not own.any() or not rank.compute_intervals.start.size:
        return None
    cost, total = (
        measure_total_ns(rank.find_exposed_intervals(own)),
        measure_total_ns(rank.find_busy_intervals(own)),
    )
    evidence = (
        f"{what}: {format_per_step(rank, own.sum())}, {format_duration(total)} in all, "
        f"{format_share(total - cost, total)} "
        "of it hidden behind compute",
        f"the longest takes {format_duration(rank.duration_ns[own].max())}",
    )
    return Detection(cost, evidence, select_longest_device_spans(rank, own))


def _uncovered(name: str, what: str, *kinds: str, remedy: str, serving: str) -> None:
    """A pattern of collectives of these kinds that no compute hides.

    Where collectives of several kinds run at once, the first in the alphabet has the moment.
    """
    title = f"{name.capitalize()} {'are' if name.endswith('s') else 'is'} not hidden"
    detected = f"{what} while nothing computes"
    cost = "measured: their time in which nothing computes; waiting for late ranks is part of it"
    words = f"exposed-{name.replace('sends and receives', 'send-receive')}"

    @detects_on_rank(Pattern(words, title, "communication", detected, cost, remedy, 0.03, serving))
    def detector(rank: RankContext) -> Detection | None:
        hit = _exposed(rank, _of_kind(rank, *kinds), what.partition(",")[0])
        return hit and hit._replace(
            cost_ns=sum(rank.exposed_ns_by_kind.get(one, 0) for one in kinds)
        )


_uncovered(
    "all-reduce", "all-reduces", "all_reduce",
    remedy="DDP: bucket_cap_mb=100 (fewer, larger) or 10 (earlier start), "
    "gradient_as_bucket_view=True, static_graph=True; accumulate with model.no_sync(); "
    "tensor parallel: sequence parallel, then async TP "
    "(torch._inductor.config._micro_pipeline_tp = True)",
    serving="an all-reduce of one shot for small messages (torch.ops.symm_mem.one_shot_all_reduce)"
    "; fewer tensor-parallel ranks, more replicas",
)  # fmt: skip
_uncovered(
    "all-gather", "all-gathers", "all_gather",
    remedy="FSDP2: module.set_modules_to_forward_prefetch([...]) and "
    "set_modules_to_backward_prefetch([...]), fully_shard(reshard_after_forward=False) where "
    "memory allows; FSDP1: forward_prefetch=True, BackwardPrefetch.BACKWARD_PRE, "
    "limit_all_gathers=False",
    serving="gather while GEMMs run (async TP: torch._inductor.config._micro_pipeline_tp = "
    "True); fewer tensor-parallel ranks, more replicas",
)  # fmt: skip
_uncovered(
    "reduce-scatter", "reduce-scatters", "reduce_scatter",
    remedy="FSDP2: larger units (fully_shard on several layers at once), accumulate with "
    "set_requires_gradient_sync(False); start reductions in backward hooks rather than after it",
    serving="scatter while GEMMs run (async TP: torch._inductor.config._micro_pipeline_tp = "
    "True); fewer tensor-parallel ranks, more replicas",
)  # fmt: skip
_uncovered(
    "all-to-all", "all-to-alls, dispatches and combines", "all_to_all", "dispatch", "combine",
    remedy="experts: overlap two micro-batches (DeepEP async_finish=True, Megatron "
    "--overlap-moe-expert-parallel-comm); embeddings: TrainPipelineSparseDist; sequence parallel "
    "(Ulysses): ring attention, which sends while it computes",
    serving="sequence parallel (Ulysses): ring attention, which sends while it computes; experts: "
    "two batches at once",
)  # fmt: skip
_uncovered(
    "sends and receives", "sends and receives", "send_recv", "send", "recv",
    remedy="pipeline: more micro-batches, batch_isend_irecv on a stream of its own, Megatron: "
    "interleaved stages without --no-overlap-p2p-communication",
    serving="pipeline: more batches in flight; inside a node tensor parallel instead",
)  # fmt: skip


@detects_on_rank(
    Pattern(
        name="small-collectives",
        title="Many small collectives",
        family="communication",
        rule="20 or more collectives of 1 MiB or less per step; where sizes are not said, 100 "
        "or more of one kind",
        cost_basis="measured: their exposed time, which is latency rather than transfer",
        remedy="put them together: DDP bucket_cap_mb=25 or more, FSDP larger units, "
        "torch.distributed._coalescing_manager around calls of one kind",
        serving_remedy="put them together: torch.distributed._coalescing_manager around calls of "
        "one kind",
    )
)
def detect_small_collectives(rank: RankContext) -> Detection | None:
    """Latency-bound collectives."""
    place, kinds = rank.communication_spans
    place = place[np.array([kind not in ("send", "recv", "send_recv") for kind in kinds], bool)]
    steps = rank.num_steps or 1.0
    size = rank.rank_timeline.column("bytes")[rank.spans.row[place]]
    small, unknown = (size >= 0) & (size <= SMALL_BYTES), size < 0
    chosen = small if small.sum() / steps >= MIN_SMALL_COLLECTIVES else np.zeros_like(small)
    if unknown.sum() / steps >= MIN_UNSIZED_COLLECTIVES:
        chosen = chosen | unknown
    if not chosen.any():
        return None
    own = np.zeros(rank.duration_ns.size, dtype=np.bool_)
    own[place[chosen]] = True
    hit = _exposed(rank, own, "small collectives")
    known = size[chosen & small]
    more = f"median size {np.median(known):,.0f} bytes" if known.size else "sizes not recorded"
    return hit and hit._replace(evidence=(*hit.evidence, more))


@detects_on_rank(
    Pattern(
        name="communication-on-compute-stream",
        title="Communication runs on the computing stream",
        family="communication",
        rule="NCCL or RCCL kernels on the stream that computes most: they cannot overlap",
        cost_basis="measured: their exposed time",
        remedy="async_op=True and wait where the result is used; a stream of its own for the "
        "group; no TORCH_NCCL_BLOCKING_WAIT=1",
        min_cost=0.02,
    )
)
def detect_communication_on_compute_stream(rank: RankContext) -> Detection | None:
    """Collectives in line with kernels."""
    own = (rank.spans.kind == COMMUNICATION) & (rank.spans.lane == rank.main_stream)
    library = np.zeros(len(rank.spans.names) + 1, dtype=np.bool_)
    for code in np.unique(rank.spans.name[own]).tolist():
        rule = match_communication_rule(rank.spans.names[code])
        library[code] = rule is not None and rule.library in {"nccl", "rccl"}
    own = own & library[rank.spans.name]
    return _exposed(rank, own, f"on {rank.spans.lanes[rank.main_stream]}") if own.any() else None


@detects_on_rank(
    Pattern(
        name="fp32-reduction",
        title="Gradients are reduced in fp32 though compute is in 16 bits",
        family="communication",
        rule="in training, all-reduces and reduce-scatters of fp32 beside GEMMs in 16 bits or less",
        cost_basis="estimated: half of their exposed time, as half the bytes would do",
        remedy="FSDP2 MixedPrecisionPolicy(reduce_dtype=torch.bfloat16); DDP "
        "model.register_comm_hook(None, default_hooks.bf16_compress_hook); check the loss",
        min_cost=0.02,
    )
)
def detect_fp32_reduction(rank: RankContext) -> Detection | None:
    """Twice the bytes that 16 bits take."""
    if not rank.is_training:
        return None
    own = _of_kind(rank, "all_reduce", "reduce_scatter")
    said = rank.rank_timeline.string_column("dtype")
    wide = np.zeros(own.size, dtype=np.bool_)
    for at in np.flatnonzero(own).tolist():
        code = said.codes[rank.spans.row[at]]
        dtype = (
            said.values[code]
            if code >= 0
            else parse_kernel_dtype(rank.spans.names[rank.spans.name[at]])
        )
        wide[at] = dtype == "fp32"
    gemms = rank.match_kernels("gemm")
    halves = gemms & rank.match_kernels("half")
    if not wide.any() or rank.duration_ns[halves].sum() < rank.duration_ns[gemms].sum() / 2:
        return None
    hit = _exposed(rank, wide, "fp32 reductions")
    return hit and hit._replace(cost_ns=(hit.cost_ns or 0) / 2)


@detects_on_rank(
    Pattern(
        name="buffer-broadcast",
        title="A broadcast in every step",
        family="communication",
        rule="broadcasts in every step",
        cost_basis="measured: their exposed time",
        remedy="broadcast what does not change once, before the loop; small objects through shared "
        "memory",
    )
)
def detect_buffer_broadcast(rank: RankContext) -> Detection | None:
    """DDP's copies of running statistics."""
    own = _of_kind(rank, "broadcast")
    if rank.num_steps is None or own.sum() < rank.num_steps * 0.9:
        return None
    return _exposed(rank, own, "broadcasts")


@detects_on_rank(
    Pattern(
        name="barrier-in-loop",
        title="A barrier in every step",
        family="communication",
        rule="c10d::barrier in at least half of the steps",
        cost_basis="measured: exposed time of the kernels it launches and late gaps while the host "
        "is "
        "inside it",
        remedy="remove torch.distributed.barrier() from the loop: collectives order ranks already",
    )
)
def detect_barrier_in_loop(rank: RankContext) -> Detection | None:
    """torch.distributed.barrier()."""
    rows = rank.host_rows("barring")
    if not rows.size or rows.size < (rank.num_steps or 2.0) / 2:
        return None
    own = rank.match_launched_in("barring")
    when = rank.host_intervals("barring")
    waits = rank.host_waits
    begun = measure_covered_ns(when, waits.gap_start, waits.gap_start + 1) > 0
    lost = int(waits.cost_ns[begun].sum())
    inside = measure_total_ns(rank.find_exposed_intervals(own))
    evidence = (
        f"{format_per_step(rank, rows.size)} barriers: {format_duration(inside)} in kernels, "
        f"{format_duration(lost)} idle after them",
    )
    spans = tuple(zip(when.start.tolist(), when.end.tolist(), strict=True))[:5]
    return Detection(inside + lost, evidence, spans)


@detects_on_rank(
    Pattern(
        name="communication-contention",
        title="Kernels take longer beside communication",
        family="communication",
        rule="kernels of one name and grid, alike in length when alone (middle half within "
        "10 %), take 10 % or more longer while communication runs; five of each at least",
        cost_basis="measured: what they take longer",
        remedy="give communication fewer multiprocessors: NCCL_MAX_CTAS=8 (NCCL_MAX_NCHANNELS), "
        "NCCL_NTHREADS=256; copy-engine collectives (NCCL_CTA_POLICY=2, NCCL 2.28)",
    )
)
def detect_communication_contention(rank: RankContext) -> Detection | None:
    """Kernels and collectives share multiprocessors and memory."""
    communication = rank.spans.intervals_of(COMMUNICATION)
    computing = rank.spans.kind == COMPUTE
    if not communication.start.size:
        return None
    beside = measure_covered_ns(communication, rank.spans.start, rank.spans.end)
    shared = computing & (2 * beside > rank.duration_ns)
    alone = computing & (beside == 0)
    alike = rank.group_similar_launches(np.flatnonzero(shared | alone))
    cost, slowed, names = 0.0, np.zeros(rank.duration_ns.size, dtype=np.bool_), 0
    for number in np.unique(alike[shared & (alike >= 0)]).tolist():
        a = rank.duration_ns[alone & (alike == number)]
        mine = shared & (alike == number)
        if a.size < 5 or mine.sum() < 5:
            continue
        low, usual, high = np.quantile(a, [0.25, 0.5, 0.75])
        if high > 1.1 * low or np.median(rank.duration_ns[mine]) < CONTENTION_SLOWDOWN * usual:
            continue
        cost += float((rank.duration_ns[mine] - usual).sum())
        slowed |= mine
        names += 1
    if cost <= 0:
        return None
    ratio = rank.duration_ns[slowed].sum() / max(1.0, rank.duration_ns[slowed].sum() - cost)
    evidence = (
        f"{int(slowed.sum())} kernels of {names} names take {ratio:.2f} times as long while "
        "communication runs",
    )
    return Detection(cost, evidence, select_longest_device_spans(rank, slowed))
