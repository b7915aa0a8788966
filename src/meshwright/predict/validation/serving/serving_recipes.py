"""`find_recipes`: how runs were laid out whose rows do not say, as whoever ran them published it.

Knows recipes alone; which of several a row is of, and what is assumed where none fits, is said by
`places`.
"""

import re
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from meshwright.predict.validation.serving.serving_model import find_gpu, find_model

_WORKERS = re.compile(r"(\d+) × (tp|dp)(\d+) ep(\d+)")

SAME_SHAPE_MODELS = {"deepseek-v3": "deepseek-r1"}
"""Models of one shape, which a table of measurements does not keep apart."""


class RecipeReplicas(NamedTuple):
    """Replicas of one kind."""

    copies: int
    tp: int
    """Ranks that share every product; 1 where requests are shared out."""
    dp: int
    ep: int


class ServingRecipe(NamedTuple):
    """A disaggregated run as it was started."""

    drafts: int
    """Tokens that are guessed in each step by multi-token prediction."""
    prefill: RecipeReplicas
    decode: RecipeReplicas


def find_recipes(row: Mapping[str, Any]) -> frozenset[ServingRecipe]:
    """Return the recipes of a row's model, GPU, engine, lengths and requests at a time."""
    model = find_model(row["model"]).name
    at_a_time = re.search(r"\d+", str(row.get("concurrency_or_batch_or_rate")))
    key = (
        SAME_SHAPE_MODELS.get(model, model), find_gpu(row["gpu"]).name, row.get("engine"),
        row.get("precision_weights"), row.get("isl"), row.get("osl"),
        int(at_a_time[0]) if at_a_time else 0,
    )  # fmt: skip
    return _published().get(key, frozenset())


@cache
def _published() -> Mapping[tuple[Any, ...], frozenset[ServingRecipe]]:
    text = files(__package__).joinpath("recipes.toml").read_text(encoding="utf-8")
    found: defaultdict[tuple[Any, ...], set[ServingRecipe]] = defaultdict(set)
    for series in tomllib.loads(text)["series"]:
        names = ("model", "gpu", "engine", "weights", "prompt", "output")
        key = tuple(series[name] for name in names)
        for drafts, prefill, decode, loads in series["runs"]:
            recipe = ServingRecipe(drafts, _workers(prefill), _workers(decode))
            for load in loads:
                found[*key, load].add(recipe)
    return {key: frozenset(recipes) for key, recipes in found.items()}


def _workers(text: str) -> RecipeReplicas:
    read = _WORKERS.fullmatch(text)
    assert read is not None, text
    copies, degree, ep = int(read[1]), int(read[3]), int(read[4])
    return RecipeReplicas(copies, *((degree, 1) if read[2] == "tp" else (1, degree)), ep)
