"""Communication of one block for one microbatch on one rank, as far as compute cannot hide it."""

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from meshwright.predict.network import (
    ExpertTraffic,
    NcclOp,
    Placement,
    build_placement,
    build_strided_placement,
    collective_s,
    predict_expert_dispatch,
)
from meshwright.predict.network.expert_dispatch import DispatcherKind
from meshwright.predict.step.block_time import PassTimes, attention_passes
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec.cluster import Cluster
from meshwright.spec.layout import Layout
from meshwright.spec.layout.ranks import get_process_group
from meshwright.spec.model import AttentionSpec, BlockSpec, LatentAttentionSpec, MoESpec


class BlockComm(NamedTuple):
    """Exposed seconds of a block's communication, forward and backward."""

    tp_forward_s: float = 0.0
    tp_backward_s: float = 0.0
    cp_forward_s: float = 0.0
    cp_backward_s: float = 0.0
    ep_forward_s: float = 0.0
    ep_backward_s: float = 0.0

    @property
    def forward_s(self) -> float:
        """All that a forward pass waits for."""
        return self.tp_forward_s + self.cp_forward_s + self.ep_forward_s

    @property
    def backward_s(self) -> float:
        """All that a backward pass waits for."""
        return self.tp_backward_s + self.cp_backward_s + self.ep_backward_s


class _Degrees(NamedTuple):
    """All of a layout that decides where its groups lie."""

    order: str
    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    expert_tp: int
    shard: int | None

    @classmethod
    def of(cls, layout: Layout, axes: str) -> "_Degrees":
        shard = layout.shard if axes in {"shard", "replicate"} else None
        sizes = layout.tp, layout.cp, layout.pp, layout.dp, layout.ep, layout.effective_expert_tp
        return cls(layout.order, *sizes, shard)

    def group(self, axes: str) -> tuple[int, ...]:
        return get_process_group(Layout(**self._asdict()), 0, axes)


def build_group_placement(cluster: Cluster, layout: Layout, axes: str) -> Placement:
    """Return where rank 0's group along some axes lies."""
    return _place(cluster, _Degrees.of(layout, axes), axes)


@lru_cache(maxsize=65536)
def _place(cluster: Cluster, degrees: _Degrees, axes: str) -> Placement:
    ranks = degrees.group(axes)
    steps = {b - a for a, b in pairwise(ranks)}
    if len(steps) <= 1:
        return build_strided_placement(cluster, ranks[0], len(ranks), steps.pop() if steps else 1)
    return build_placement(cluster, ranks)


def list_neighbor_placements(
    cluster: Cluster, layout: Layout, axis: str
) -> tuple[tuple[Placement, int], ...]:
    """Return where ranks next to each other along an axis lie, and how many pairs lie so."""
    return _neighbours(cluster, _Degrees.of(layout, axis), axis)


@lru_cache(maxsize=65536)
def _neighbours(
    cluster: Cluster, degrees: _Degrees, axis: str
) -> tuple[tuple[Placement, int], ...]:
    domain = cluster.scale_up.gpus
    # Pairs inside one fast domain are alike, and so are those that leave it.
    pairs = list(pairwise(degrees.group(axis)))
    inside = [pair for pair in pairs if pair[0] // domain == pair[1] // domain]
    across = [pair for pair in pairs if pair[0] // domain != pair[1] // domain]
    return tuple(
        (build_strided_placement(cluster, some[0][0], 2, some[0][1] - some[0][0]), len(some))
        for some in (inside, across)
        if some
    )


def predict_block_comm(run: TrainingRun, block: BlockSpec, passes: PassTimes) -> BlockComm:
    """Return the exposed communication of a block whose compute is `passes`."""
    if run.measured is not None:
        return run.measured.blocks[block.name].comm
    tp_forward, tp_backward = _tensor(run, block, passes)
    cp_forward, cp_backward = _context(run, block)
    ep_forward, ep_backward = _experts(run, block, passes)
    return BlockComm(tp_forward, tp_backward, cp_forward, cp_backward, ep_forward, ep_backward)


def _tensor(run: TrainingRun, block: BlockSpec, passes: PassTimes) -> tuple[float, float]:
    """Gathers and scatters around split products, or sums after them."""
    layout = run.layout
    experts = block.mlp if isinstance(block.mlp, MoESpec) else None
    parts = (block.mixer is not None) + (block.mlp is not None)
    if experts is not None and (layout.effective_expert_tp > 1 or not experts.shared_width):
        parts -= 1  # routed tokens stay on their ranks, or are shared by the ranks of an expert
    return tp_exposed_s(run, passes, lambda op: _shared_s(run, experts, parts, op))


def tp_exposed_s(
    run: TrainingRun, passes: PassTimes, seconds: Callable[[NcclOp], float]
) -> tuple[float, float]:
    """Return what ranks that share products wait for each other, forward and backward.

    `seconds` says how long their collectives take.
    """
    layout, share = run.layout, run.constants.comm_sm_share
    beside, ahead = passes.wgrad_s, passes.dgrad_s
    if not run.framework.tp_async:
        beside = ahead = 0.0
    left = 1.0
    if run.framework.tp_overlap or layout.overlap_tp:
        left -= run.constants.tp_overlap_share
    if not layout.sequence_parallel:
        reduce_s = seconds("all_reduce")
        return left * reduce_s, left * _left(reduce_s, beside, share)
    gather, scatter = seconds("all_gather"), seconds("reduce_scatter")
    # Backward gathers its gradient, and its input again behind the input gradient; its scatter
    # runs behind the weight gradient (Korthikanti et al. 2022, figure 5; Megatron-LM).
    backward = gather + _left(scatter, beside, share)
    # Frozen weights need no input, and adapters keep theirs gathered.
    again = 0.0 if run.frozen else _left(gather, ahead, share)
    return left * (gather + scatter), left * (backward + again)


def _shared_s(run: TrainingRun, experts: MoESpec | None, parts: int, op: NcclOp) -> float:
    """Return one collective around each part of a block that ranks share.

    The ranks of one expert see each other's tokens, which are fewer where they are more.
    """
    layout, seconds = run.layout, 0.0
    if layout.tp > 1:
        size = 2.0 * run.microbatch_tokens * run.model.hidden
        seconds += parts * collective_s(build_group_placement(run.cluster, layout, "tp"), op, size)
    if experts is not None and layout.effective_expert_tp > 1:
        size = dispatch_bytes(run)
        seconds += collective_s(build_group_placement(run.cluster, layout, "expert_tp"), op, size)
    return seconds


def dispatch_bytes(run: TrainingRun) -> float:
    """Return what the ranks of one expert show each other of their tokens."""
    layout = run.layout
    return 2.0 * run.microbatch_tokens * run.model.hidden * layout.effective_expert_tp / layout.tp


def _context(run: TrainingRun, block: BlockSpec) -> tuple[float, float]:
    """Keys and values passed around a ring, or exchanged at once."""
    mixer, layout = block.mixer, run.layout
    if layout.cp == 1 or not isinstance(mixer, AttentionSpec | LatentAttentionSpec):
        return 0.0, 0.0
    queries, width = _widths(mixer, layout.tp)
    keys = 2.0 * run.microbatch_tokens * width
    if layout.cp_kind == "ulysses":
        group = build_group_placement(run.cluster, layout, "cp")
        once = collective_s(group, "all_to_all", keys + 4.0 * run.microbatch_tokens * queries)
        return once, once
    if layout.cp_kind == "allgather":
        group = build_group_placement(run.cluster, layout, "cp")
        gather = collective_s(group, "all_gather", keys * layout.cp)
        return gather, gather + collective_s(group, "reduce_scatter", keys * layout.cp)
    ring, core, share = (
        ring_attention_s(run, mixer),
        attention_passes(run, block),
        run.constants.comm_sm_share,
    )
    return _left(ring, core.forward_s, share), _left(2 * ring, core.dgrad_s, share)


def ring_attention_s(run: TrainingRun, mixer: AttentionSpec | LatentAttentionSpec) -> float:
    """Return how long keys and values go round; their gradients take as long again."""
    keys = 2.0 * run.microbatch_tokens * _widths(mixer, run.layout.tp)[1]
    # All ranks send at once, so the slowest link sets the pace.
    pairs = list_neighbor_placements(run.cluster, run.layout, "cp")
    return (run.layout.cp - 1) * max(collective_s(pair, "send_recv", keys) for pair, _ in pairs)


def _widths(mixer: AttentionSpec | LatentAttentionSpec, tp: int) -> tuple[int, int]:
    """Return the widths of queries and of keys with values on one tensor rank."""
    if isinstance(mixer, AttentionSpec):
        keys = 2 * max(1, mixer.kv_heads // tp) * mixer.head_dim
        return mixer.heads // tp * mixer.head_dim, keys
    heads, key = mixer.heads // tp, mixer.nope_dim + mixer.rope_dim
    return heads * key, heads * (key + mixer.value_dim)


def _experts(run: TrainingRun, block: BlockSpec, passes: PassTimes) -> tuple[float, float]:
    """Tokens to their experts and back, forward and backward."""
    layout = run.layout
    if not isinstance(block.mlp, MoESpec) or layout.ep == 1:
        return 0.0, 0.0
    both = 2 * dispatch_s(run, block.mlp, build_group_placement(run.cluster, layout, "ep"))
    if not layout.overlap_ep:
        return both, both
    hide, share = run.constants.expert_overlap_share, run.constants.comm_sm_share
    return (
        _left(both, hide * passes.forward_s, share),
        _left(both, hide * passes.backward_s, share),
    )


def dispatch_s(run: TrainingRun, experts: MoESpec, group: Placement) -> float:
    """Return how long tokens take to their experts, or back from them."""
    traffic = ExpertTraffic(
        tokens=max(1, run.microbatch_tokens // run.layout.tp),
        token_bytes=2.0 * (experts.latent or run.model.hidden),
        top_k=experts.top_k,
        load_imbalance=run.expert_load(experts),
    )
    return _exchange_s(group, traffic, run.framework.dispatcher)


@lru_cache(maxsize=65536)
def _exchange_s(group: Placement, traffic: ExpertTraffic, style: DispatcherKind) -> float:
    return predict_expert_dispatch(group, traffic, style=style).seconds


def _left(communication_s: float, behind_s: float, share: float) -> float:
    """Return what communication adds where it can hide behind compute that it slows down."""
    hidden = min(communication_s, behind_s)
    return communication_s - hidden + share * hidden
