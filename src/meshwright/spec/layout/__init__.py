"""`Layout`: how a model lies on a cluster, the ranks it makes and the bytes it places."""

from meshwright.spec.layout.choices import (
    ContextParallelKind,
    Offload,
    Optimizer,
    Precision,
    Recompute,
    RecomputeOp,
    ScheduleKind,
    StatePrecision,
)
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.model_states import (
    RankParameters,
    StateBytes,
    count_rank_parameters,
    rank_state_bytes,
    stage_state_bytes,
)
from meshwright.spec.layout.pipeline_chunks import (
    ModelChunk,
    list_chunks,
    list_chunks_by_rank,
    split_layers,
)

__all__ = [
    "ContextParallelKind",
    "Layout",
    "ModelChunk",
    "Offload",
    "Optimizer",
    "Precision",
    "RankParameters",
    "Recompute",
    "RecomputeOp",
    "ScheduleKind",
    "StateBytes",
    "StatePrecision",
    "count_rank_parameters",
    "list_chunks",
    "list_chunks_by_rank",
    "rank_state_bytes",
    "split_layers",
    "stage_state_bytes",
]
