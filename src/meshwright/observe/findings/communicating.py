"""Patterns of communication that one rank shows."""

import numpy as np

from meshwright.observe.analyze.spans import (
    COMMUNICATION,
    COMPUTE,
    Flags,
    covered,
    measure,
)
from meshwright.observe.findings.rank import Rank
from meshwright.observe.findings.registry import Hit, Pattern, of_rank
from meshwright.observe.findings.say import per_step, places, share, took
from meshwright.timeline.readers.communication import dtype_in, rule_of

SMALL_BYTES = 1 << 20
MANY_SMALL = 20
"""Collectives per step, of 1 MiB or less."""
MANY_UNKNOWN = 100
"""Collectives per step, where the trace says no sizes."""
SLOWED = 1.10
"""Kernels beside communication take so many times as long as alone."""


def _of_kind(rank: Rank, *wanted: str) -> Flags:
    own, kinds = rank.collectives
    found = np.zeros(rank.length.size, dtype=np.bool_)
    found[own[np.array([kind in wanted for kind in kinds], dtype=np.bool_)]] = True
    return found


def _exposed(rank: Rank, own: Flags, what: str) -> Hit | None:
    """Collectives that nothing hides; none where nothing computes, as in a test of links."""
    if not own.any() or not rank.compute.start.size:
        return None
    cost, total = measure(rank.exposed(own)), measure(rank.when(own))
    evidence = (
        f"{what}: {per_step(rank, own.sum())}, {took(total)} in all, {share(total - cost, total)} "
        "of it hidden behind compute",
        f"the longest takes {took(rank.length[own].max())}",
    )
    return Hit(cost, evidence, places(rank, own))


def _uncovered(name: str, what: str, *kinds: str, remedy: str, serving: str) -> None:
    """A pattern of collectives of these kinds that no compute hides.

    Where collectives of several kinds run at once, the first in the alphabet has the moment.
    """
    title = f"{name.capitalize()} {'are' if name.endswith('s') else 'is'} not hidden"
    detected = f"{what} while nothing computes"
    cost = "measured: their time in which nothing computes; waiting for late ranks is part of it"
    words = f"exposed-{name.replace('sends and receives', 'send-receive')}"

    @of_rank(Pattern(words, title, "communication", detected, cost, remedy, 0.03, serving))
    def detector(rank: Rank) -> Hit | None:
        hit = _exposed(rank, _of_kind(rank, *kinds), what.partition(",")[0])
        return hit and hit._replace(cost_ns=sum(rank.exposed_by_kind.get(one, 0) for one in kinds))


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
    serving="gather while products run (async TP: torch._inductor.config._micro_pipeline_tp = "
    "True); fewer tensor-parallel ranks, more replicas",
)  # fmt: skip
_uncovered(
    "reduce-scatter", "reduce-scatters", "reduce_scatter",
    remedy="FSDP2: larger units (fully_shard on several layers at once), accumulate with "
    "set_requires_gradient_sync(False); start reductions in backward hooks rather than after it",
    serving="scatter while products run (async TP: torch._inductor.config._micro_pipeline_tp = "
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


@of_rank(
    Pattern(
        name="small-collectives",
        title="Many small collectives",
        family="communication",
        detected="20 or more collectives of 1 MiB or less per step; where sizes are not said, 100 "
        "or more of one kind",
        cost="measured: their exposed time, which is latency rather than transfer",
        remedy="put them together: DDP bucket_cap_mb=25 or more, FSDP larger units, "
        "torch.distributed._coalescing_manager around calls of one kind",
        serving="put them together: torch.distributed._coalescing_manager around calls of one kind",
    )
)
def small_collectives(rank: Rank) -> Hit | None:
    """Latency-bound collectives."""
    place, kinds = rank.collectives
    place = place[np.array([kind not in ("send", "recv", "send_recv") for kind in kinds], bool)]
    steps = rank.num_steps or 1.0
    size = rank.part.column("bytes")[rank.spans.row[place]]
    small, unknown = (size >= 0) & (size <= SMALL_BYTES), size < 0
    chosen = small if small.sum() / steps >= MANY_SMALL else np.zeros_like(small)
    if unknown.sum() / steps >= MANY_UNKNOWN:
        chosen = chosen | unknown
    if not chosen.any():
        return None
    own = np.zeros(rank.length.size, dtype=np.bool_)
    own[place[chosen]] = True
    hit = _exposed(rank, own, "small collectives")
    known = size[chosen & small]
    more = f"median size {np.median(known):,.0f} bytes" if known.size else "sizes not recorded"
    return hit and hit._replace(evidence=(*hit.evidence, more))


@of_rank(
    Pattern(
        name="communication-on-compute-stream",
        title="Communication runs on the computing stream",
        family="communication",
        detected="NCCL or RCCL kernels on the stream that computes most: they cannot overlap",
        cost="measured: their exposed time",
        remedy="async_op=True and wait where the result is used; a stream of its own for the "
        "group; no TORCH_NCCL_BLOCKING_WAIT=1",
        least_share=0.02,
    )
)
def communication_on_compute_stream(rank: Rank) -> Hit | None:
    """Collectives in line with kernels."""
    own = (rank.spans.kind == COMMUNICATION) & (rank.spans.lane == rank.main_lane)
    library = np.zeros(len(rank.spans.names) + 1, dtype=np.bool_)
    for code in np.unique(rank.spans.name[own]).tolist():
        rule = rule_of(rank.spans.names[code])
        library[code] = rule is not None and rule.library in {"nccl", "rccl"}
    own = own & library[rank.spans.name]
    return _exposed(rank, own, f"on {rank.spans.lanes[rank.main_lane]}") if own.any() else None


@of_rank(
    Pattern(
        name="fp32-reduction",
        title="Gradients are reduced in fp32 though compute is in 16 bits",
        family="communication",
        detected="in training, all-reduces and reduce-scatters of fp32 beside products in 16 bits "
        "or less",
        cost="estimated: half of their exposed time, as half the bytes would do",
        remedy="FSDP2 MixedPrecisionPolicy(reduce_dtype=torch.bfloat16); DDP "
        "model.register_comm_hook(None, default_hooks.bf16_compress_hook); check the loss",
        least_share=0.02,
    )
)
def fp32_reduction(rank: Rank) -> Hit | None:
    """Twice the bytes that 16 bits take."""
    if not rank.trains:
        return None
    own = _of_kind(rank, "all_reduce", "reduce_scatter")
    said = rank.part.strings("dtype")
    wide = np.zeros(own.size, dtype=np.bool_)
    for at in np.flatnonzero(own).tolist():
        code = said.codes[rank.spans.row[at]]
        dtype = said.values[code] if code >= 0 else dtype_in(rank.spans.names[rank.spans.name[at]])
        wide[at] = dtype == "fp32"
    halves = rank.kernels("product") & rank.kernels("half")
    products = rank.kernels("product")
    if not wide.any() or rank.length[halves].sum() < rank.length[products].sum() / 2:
        return None
    hit = _exposed(rank, wide, "fp32 reductions")
    return hit and hit._replace(cost_ns=(hit.cost_ns or 0) / 2)


@of_rank(
    Pattern(
        name="buffer-broadcast",
        title="A broadcast in every step",
        family="communication",
        detected="broadcasts in every step",
        cost="measured: their exposed time",
        remedy="broadcast what does not change once, before the loop; small objects through shared "
        "memory",
    )
)
def buffer_broadcast(rank: Rank) -> Hit | None:
    """DDP's copies of running statistics."""
    own = _of_kind(rank, "broadcast")
    if rank.num_steps is None or own.sum() < rank.num_steps * 0.9:
        return None
    return _exposed(rank, own, "broadcasts")


@of_rank(
    Pattern(
        name="barrier-in-loop",
        title="A barrier in every step",
        family="communication",
        detected="c10d::barrier in at least half of the steps",
        cost="measured: exposed time of the kernels it launches and late gaps while the host is "
        "inside it",
        remedy="remove torch.distributed.barrier() from the loop: collectives order ranks already",
    )
)
def barrier_in_loop(rank: Rank) -> Hit | None:
    """torch.distributed.barrier()."""
    rows = rank.host_rows("barring")
    if not rows.size or rows.size < (rank.num_steps or 2.0) / 2:
        return None
    own = rank.launched_in("barring")
    when = rank.host_time("barring")
    waits = rank.waits
    begun = covered(when, waits.gap_start, waits.gap_start + 1) > 0
    lost = int(waits.cost_ns[begun].sum())
    inside = measure(rank.exposed(own))
    evidence = (
        f"{per_step(rank, rows.size)} barriers: {took(inside)} in kernels, "
        f"{took(lost)} idle after them",
    )
    spans = tuple(zip(when.start.tolist(), when.end.tolist(), strict=True))[:5]
    return Hit(inside + lost, evidence, spans)


@of_rank(
    Pattern(
        name="communication-slows-compute",
        title="Kernels take longer beside communication",
        family="communication",
        detected="kernels of one name and grid, alike in length when alone (middle half within "
        "10 %), take 10 % or more longer while communication runs; five of each at least",
        cost="measured: what they take longer",
        remedy="give communication fewer multiprocessors: NCCL_MAX_CTAS=8 (NCCL_MAX_NCHANNELS), "
        "NCCL_NTHREADS=256; copy-engine collectives (NCCL_CTA_POLICY=2, NCCL 2.28)",
    )
)
def communication_slows_compute(rank: Rank) -> Hit | None:
    """Kernels and collectives share multiprocessors and memory."""
    communication = rank.spans.of(COMMUNICATION)
    computing = rank.spans.kind == COMPUTE
    if not communication.start.size:
        return None
    beside = covered(communication, rank.spans.start, rank.spans.end)
    shared = computing & (2 * beside > rank.length)
    alone = computing & (beside == 0)
    alike = rank.like_launches(np.flatnonzero(shared | alone))
    cost, slowed, names = 0.0, np.zeros(rank.length.size, dtype=np.bool_), 0
    for number in np.unique(alike[shared & (alike >= 0)]).tolist():
        a = rank.length[alone & (alike == number)]
        mine = shared & (alike == number)
        if a.size < 5 or mine.sum() < 5:
            continue
        low, usual, high = np.quantile(a, [0.25, 0.5, 0.75])
        if high > 1.1 * low or np.median(rank.length[mine]) < SLOWED * usual:
            continue
        cost += float((rank.length[mine] - usual).sum())
        slowed |= mine
        names += 1
    if cost <= 0:
        return None
    ratio = rank.length[slowed].sum() / max(1.0, rank.length[slowed].sum() - cost)
    evidence = (
        f"{int(slowed.sum())} kernels of {names} names take {ratio:.2f} times as long while "
        "communication runs",
    )
    return Hit(cost, evidence, places(rank, slowed))
