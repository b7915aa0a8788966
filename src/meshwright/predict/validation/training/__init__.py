"""Published training runs: rows of a table read as work, predicted, and scored."""

from meshwright.predict.validation.training.order_score import OrderScore, score_order
from meshwright.predict.validation.training.run_score import (
    ScoredRun,
    read_runs,
    score_run,
    score_runs,
)
from meshwright.predict.validation.training.score_summary import summarize_scores

__all__ = [
    "OrderScore",
    "ScoredRun",
    "read_runs",
    "score_order",
    "score_run",
    "score_runs",
    "summarize_scores",
]
