"""`Layout`: how a model lies on a cluster, the ranks it makes and the bytes it places."""

from meshwright.spec.layout.kinds import (
    ContextKind,
    Offload,
    Optimizer,
    Precision,
    Recompute,
    RecomputeOp,
    ScheduleKind,
    StatePrecision,
)
from meshwright.spec.layout.layout import Layout
from meshwright.spec.layout.stages import Chunk, chunks, rank_chunks, split_layers
from meshwright.spec.layout.states import (
    RankParameters,
    StateBytes,
    rank_parameters,
    state_bytes,
    states_of,
)

__all__ = [
    "Chunk",
    "ContextKind",
    "Layout",
    "Offload",
    "Optimizer",
    "Precision",
    "RankParameters",
    "Recompute",
    "RecomputeOp",
    "ScheduleKind",
    "StateBytes",
    "StatePrecision",
    "chunks",
    "rank_chunks",
    "rank_parameters",
    "split_layers",
    "state_bytes",
    "states_of",
]
