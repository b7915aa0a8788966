"""Published serving runs, parsed, predicted and scored row by row."""

from meshwright.predict.validation.serving.serving_score import ScoredServing, score_serving
from meshwright.predict.validation.serving.serving_summary import summarize_serving
from meshwright.predict.validation.training.run_score import read_runs

__all__ = ["ScoredServing", "read_runs", "score_serving", "summarize_serving"]
