"""Published training runs: rows of a table read as work, predicted, and scored."""

from meshwright.predict.published.ranking import Ranked, ranking
from meshwright.predict.published.score import Scored, read_rows, score, score_row
from meshwright.predict.published.summary import summary

__all__ = ["Ranked", "Scored", "ranking", "read_rows", "score", "score_row", "summary"]
