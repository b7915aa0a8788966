"""`Layout`: how a model lies on a cluster. It knows sizes and switches, no model and no cluster.

Degrees follow Megatron's convention: `tp × cp × pp × dp` is the number of GPUs, and expert
parallelism re-divides the `tp × cp × dp` GPUs of one pipeline stage into
`expert_tp × ep × expert_dp`.
"""

from typing import TYPE_CHECKING

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.layout.choices import (
    AXIS_ORDERS,
    CHOICES,
    MAX_VALUES,
    MULTI_CHUNK_SCHEDULES,
    OFFLOADS,
    RECOMPUTE_OPS,
    V_SCHEDULES,
    ContextParallelKind,
    Offload,
    Optimizer,
    Precision,
    Recompute,
    RecomputeOp,
    ScheduleKind,
    StatePrecision,
)
from meshwright.spec.layout.constraints import check_layout
from meshwright.spec.layout.field_rules import check_layer_split, list_layout_problems

if TYPE_CHECKING:
    from meshwright.spec.cluster import Cluster
    from meshwright.spec.model import Model
    from meshwright.spec.workload import TrainingWorkload


class Layout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model lies on a cluster: parallel degrees, batch split, precision, overlap.

    Building one checks the values against each other; `check_layout` holds it against a model and a
    cluster as well and returns every violated constraint with a fix.
    """

    tp: int = 1
    """Tensor parallel: GPUs that share each matrix product."""
    sequence_parallel: bool = False
    """Split norms, dropout and residuals along the sequence inside the tensor-parallel group."""
    cp: int = 1
    """Context parallel: GPUs that share one sequence."""
    cp_kind: ContextParallelKind = "ring"
    """How context-parallel ranks see each other's keys and values."""
    pp: int = 1
    """Pipeline parallel: stages."""
    virtual_stages: int = 1
    """Model chunks per pipeline rank."""
    stage_layers: tuple[int, ...] | None = None
    """Layers of each of the `pp × virtual_stages` chunks, in model order; None splits evenly."""
    dp: int = 1
    """Data parallel: replicas of the model, sharded or not."""
    shard: int | None = None
    """Data-parallel GPUs (context-parallel ones included) that share one copy of the sharded
    states; None shares it over all of them. Smaller is hybrid sharding."""
    ep: int = 1
    """Expert parallel: groups over which routed experts are spread."""
    expert_tp: int | None = None
    """Tensor parallel inside each expert; None means `tp`."""
    zero: int = 0
    """What is sharded over data parallel: 0 nothing, 1 optimizer states (Megatron's distributed
    optimizer), 2 gradients too, 3 parameters too (FSDP)."""
    recompute: Recompute = "none"
    """Activations computed again in backward: none, those of `recompute_ops`, or whole layers."""
    recompute_ops: tuple[RecomputeOp, ...] = ()
    """The operations that selective recompute covers."""
    recompute_layers: int | None = None
    """Layers per chunk to which recompute applies; None applies it to all."""
    precision: Precision = "bf16"
    """Number format of the matrix products."""
    optimizer: Optimizer = "adamw"
    """The update rule; decides how many states each parameter carries."""
    master_precision: StatePrecision = "fp32"
    """Format of the optimizer's own copy of the weights; `none` updates the weights in place."""
    gradient_precision: StatePrecision = "fp32"
    """Format in which gradients are accumulated."""
    moment_precision: StatePrecision = "fp32"
    """Format of the optimizer's moments."""
    microbatch: int = 1
    """Sequences per data-parallel replica in one forward pass."""
    global_batch: int | None = None
    """Sequences per step over all replicas; None takes the workload's."""
    schedule: ScheduleKind = "1f1b"
    """Order of forward and backward passes in the pipeline."""
    overlap_gradients: bool = True
    """Reduce gradients while backward still runs."""
    overlap_parameters: bool = True
    """Gather sharded parameters ahead of their use."""
    overlap_tp: bool = False
    """Split tensor-parallel products so that their communication hides behind them."""
    overlap_pp: bool = True
    """Send pipeline activations while the next microbatch computes."""
    overlap_ep: bool = False
    """Hide the experts' all-to-all behind other microbatches' compute."""
    offload: tuple[Offload, ...] = ()
    """What is kept in host memory between uses."""
    offload_layers: int | None = None
    """Layers per chunk whose activations are offloaded; None offloads all."""
    order: str = "tp-cp-ep-dp-pp"
    """Axes from the fastest-changing (neighbouring GPUs) to the slowest, as Megatron writes it."""

    def __post_init__(self) -> None:
        # The planner builds millions, so one pass of cheap tests decides and only a layout that
        # fails them pays for the explanation.
        try:
            sound = _degrees_fit(self) and _choices_known(self) and _extras_fit(self)
        except TypeError:
            sound = False
        if not sound:
            raise InputError(list_layout_problems(self))

    @property
    def gpus(self) -> int:
        """GPUs the layout occupies."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def effective_expert_tp(self) -> int:
        """Tensor-parallel degree inside each expert."""
        return self.expert_tp or self.tp

    @property
    def expert_dp(self) -> int:
        """Replicas of each expert shard."""
        return self.tp * self.cp * self.dp // (self.effective_expert_tp * self.ep)

    @property
    def shard_degree(self) -> int:
        """GPUs that share one copy of the states which `zero` shards."""
        return self.shard or self.dp * self.cp

    @property
    def chunks(self) -> int:
        """Model chunks over the whole pipeline."""
        return self.pp * self.virtual_stages

    def count_microbatches(self, global_batch: int) -> int:
        """Return how many microbatches each replica runs in one step."""
        return global_batch // (self.dp * self.microbatch)

    def check(
        self, model: "Model", cluster: "Cluster", workload: "TrainingWorkload | None" = None
    ) -> tuple[Problem, ...]:
        """Return every constraint that this layout violates, each with a fix."""
        return check_layout(self, model, cluster, workload)


def _degrees_fit(layout: Layout) -> bool:
    tp, cp, pp, dp, ep = layout.tp, layout.cp, layout.pp, layout.dp, layout.ep
    microbatch, chunks, zero = layout.microbatch, layout.virtual_stages, layout.zero
    return (
        type(tp) is type(cp) is type(pp) is type(dp) is type(ep) is int
        and type(microbatch) is type(chunks) is type(zero) is int
        and 0 < tp <= MAX_VALUES["tp"]
        and 0 < cp <= MAX_VALUES["cp"]
        and 0 < pp <= MAX_VALUES["pp"]
        and 0 < dp <= MAX_VALUES["dp"]
        and 0 < ep <= MAX_VALUES["ep"]
        and 0 < microbatch <= MAX_VALUES["microbatch"]
        and 0 < chunks <= MAX_VALUES["virtual_stages"]
        and 0 <= zero <= 3
        and (chunks == 1 or pp > 1)
        and tp * cp * dp % ((layout.expert_tp or tp) * ep) == 0
        and (not layout.sequence_parallel or tp > 1)
    )


def _choices_known(layout: Layout) -> bool:
    return (
        layout.precision in CHOICES["precision"]
        and layout.schedule in CHOICES["schedule"]
        and layout.recompute in CHOICES["recompute"]
        and layout.optimizer in CHOICES["optimizer"]
        and layout.cp_kind in CHOICES["cp_kind"]
        and layout.master_precision in CHOICES["master_precision"]
        and layout.gradient_precision in CHOICES["gradient_precision"]
        and layout.moment_precision in CHOICES["moment_precision"]
        and layout.order in AXIS_ORDERS
        and _are_switches(layout.sequence_parallel, layout.overlap_gradients)
        and _are_switches(layout.overlap_parameters, layout.overlap_tp)
        and _are_switches(layout.overlap_pp, layout.overlap_ep)
    )


def _are_switches(one: object, other: object) -> bool:
    return type(one) is type(other) is bool


def _extras_fit(layout: Layout) -> bool:
    batch, shard, split = layout.global_batch, layout.shard, layout.stage_layers
    expert_tp, layers, spread = layout.expert_tp, layout.recompute_layers, layout.dp * layout.cp
    away = layout.offload_layers
    return (
        (batch is None or _counts(batch, "global_batch"))
        and (batch is None or batch % (layout.dp * layout.microbatch) == 0)
        and (shard is None or (_counts(shard, "shard") and spread % shard == 0))
        and (expert_tp is None or _counts(expert_tp, "expert_tp"))
        and _schedule_fits(layout.schedule, layout.pp, layout.virtual_stages)
        and (split is None or not check_layer_split(split, layout.chunks))
        and (not layout.recompute_ops or layout.recompute == "selective")
        and RECOMPUTE_OPS.issuperset(layout.recompute_ops)
        and (layers is None or (type(layers) is int and layers >= 0))
        and (layers is None or layout.recompute != "none")
        and OFFLOADS.issuperset(layout.offload)
        and (away is None or (type(away) is int and away >= 0))
        and (away is None or "activations" in layout.offload)
    )


def _counts(value: int, name: str) -> bool:
    return type(value) is int and 0 < value <= MAX_VALUES[name]


def _schedule_fits(schedule: ScheduleKind, pp: int, chunks: int) -> bool:
    if pp == 1 or schedule == "1f1b":
        return chunks == 1
    if schedule in MULTI_CHUNK_SCHEDULES:
        return chunks == 2 or (chunks > 2 and schedule not in V_SCHEDULES)
    return chunks == 1 and (schedule != "dualpipe" or pp % 2 == 0)
