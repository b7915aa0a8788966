"""Published training runs: rows of a table read as work, predicted, and scored."""

from meshwright.predict.published.score import Scored, read_rows, score, score_row, summary

__all__ = ["Scored", "read_rows", "score", "score_row", "summary"]
