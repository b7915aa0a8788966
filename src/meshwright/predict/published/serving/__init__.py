"""Published serving runs, parsed, predicted and scored row by row."""

from meshwright.predict.published.score import read_rows
from meshwright.predict.published.serving.score import ScoredServing, score
from meshwright.predict.published.serving.summary import summary

__all__ = ["ScoredServing", "read_rows", "score", "summary"]
