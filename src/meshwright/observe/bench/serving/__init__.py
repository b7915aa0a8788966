"""What a server does under load: any OpenAI-compatible one, asked and timed token by token."""

from meshwright.observe.bench.serving.compare import compare, pairs_of
from meshwright.observe.bench.serving.figures import figures_of, parse_objective
from meshwright.observe.bench.serving.measure import Settings, Turn, measure
from meshwright.observe.bench.serving.result import Result, Run, load, save
from meshwright.observe.bench.serving.served import Served

__all__ = [
    "Result",
    "Run",
    "Served",
    "Settings",
    "Turn",
    "compare",
    "figures_of",
    "load",
    "measure",
    "pairs_of",
    "parse_objective",
    "save",
]
