"""Published collectives: rows of benchmarks read as groups of GPUs, predicted, and scored."""

from meshwright.predict.published.collectives.operations import By
from meshwright.predict.published.collectives.rows import Row, packed, read_rows
from meshwright.predict.published.collectives.score import Scored, score, score_row
from meshwright.predict.published.collectives.summary import Group, Summary, grouped, summary
from meshwright.predict.published.collectives.systems import System, system
from meshwright.predict.published.collectives.tuning_log import Compared, compare, read_log

__all__ = [
    "By",
    "Compared",
    "Group",
    "Row",
    "Scored",
    "Summary",
    "System",
    "compare",
    "grouped",
    "packed",
    "read_log",
    "read_rows",
    "score",
    "score_row",
    "summary",
    "system",
]
