"""Published collectives: rows of benchmarks read as groups of GPUs, predicted, and scored."""

from meshwright.predict.validation.collectives.collective_score import (
    ScoredCollective,
    score_collective,
    score_collectives,
)
from meshwright.predict.validation.collectives.collective_summary import (
    CollectiveErrorGroup,
    CollectiveErrorSummary,
    summarize_collectives,
    summarize_group,
)
from meshwright.predict.validation.collectives.nccl_tuning_log import (
    TuningComparison,
    compare_tuning_log,
    read_tuning_log,
)
from meshwright.predict.validation.collectives.row_prediction import PredictionMethod
from meshwright.predict.validation.collectives.row_system import MeasuredSystem, read_system
from meshwright.predict.validation.collectives.sweep_rows import Row, pack_sweeps, read_sweep_rows

__all__ = [
    "CollectiveErrorGroup",
    "CollectiveErrorSummary",
    "MeasuredSystem",
    "PredictionMethod",
    "Row",
    "ScoredCollective",
    "TuningComparison",
    "compare_tuning_log",
    "pack_sweeps",
    "read_sweep_rows",
    "read_system",
    "read_tuning_log",
    "score_collective",
    "score_collectives",
    "summarize_collectives",
    "summarize_group",
]
