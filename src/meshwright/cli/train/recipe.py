"""`mw train --recipe`: recipes of post-training, from a job file or a model's path and words."""

import argparse
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.cli.flags.overrides import parse_overrides
from meshwright.cli.result import TextView
from meshwright.errors import InputError
from meshwright.spec.file_formats import FORMATS, load_data

if TYPE_CHECKING:
    from meshwright.run.posttrain.supervised.recipe_job import RecipeJob
    from meshwright.run.posttrain.supervised.recipe_task import RecipeTask
    from meshwright.run.train.job.job_file import JobWithOrigins

SUPERVISED_RECIPES = ("sft", "lora", "dora", "dpo", "ipo", "kto", "reward", "distillation")
RECIPES = (*SUPERVISED_RECIPES, "grpo")
RECIPE_OVERRIDES = {
    "ppo": "objective.adv_estimator=gae",
    "rloo": "objective.adv_estimator=leave-one-out objective.loss=reinforce",
    "reinforce++": "objective.adv_estimator=whitened",
    "dapo": "extra_prompts=64 objective.clip_ratio_high=0.28 objective.overlong_buffer=16",
    "gspo": "objective.loss=gspo objective.loss_agg_mode=sequence",
    "cispo": "objective.loss=cispo",
}
"""Algorithms that are settings of one recipe."""


class ResolvedRecipe(NamedTuple):
    """A recipe that can be trained."""

    job: "JobWithOrigins"
    task: "RecipeTask"
    data: TextView
    """What became of the records."""


def is_recipe(args: argparse.Namespace) -> bool:
    """Tell whether a command line, or the file it names, asks for a recipe."""
    return args.recipe is not None or is_recipe_file(Path(args.job), args.files)


def is_recipe_file(path: Path, words: Sequence[str]) -> bool:
    """Tell whether a job's file, or the words after it, name a recipe."""
    if "recipe" in parse_overrides(words):
        return True
    try:
        return path.suffix in FORMATS and path.is_file() and "recipe" in load_data(path)
    except InputError:
        return False  # for whoever reads it as a job to say


def read_recipe_job(args: argparse.Namespace) -> ResolvedRecipe:
    """Read a recipe and its records."""
    from meshwright.run.posttrain.supervised import load_recipe, open_recipe

    asked = load_recipe(args.job, parse_overrides(args.files), kind=args.recipe)
    task, job = open_recipe(_recipe(asked))
    told = "\n".join(task.train_dataset(job, rank=0, world=1).stats.summary_lines())
    epochs, origins = _recipe(asked).epochs, dict(asked.origins)
    if epochs is not None:
        where = origins.pop("epochs", "default")
        origins["workload.tokens"] = f"epochs={epochs:g}, {where}"
    return ResolvedRecipe(asked._replace(job=job, origins=origins), task, TextView(told))


def _recipe(asked: "JobWithOrigins") -> "RecipeJob":
    from meshwright.run.posttrain.supervised import RecipeJob

    assert isinstance(asked.job, RecipeJob)
    return asked.job


def find_loss_unit(asked: "JobWithOrigins") -> str:
    """Return what a recipe's loss is a mean of."""
    from meshwright.run.posttrain.supervised.recipe_config import METRIC_UNITS, get_recipe_name

    name = get_recipe_name(_recipe(asked).recipe)
    counted = METRIC_UNITS.get(name)
    return "nats per token" if counted is None else f"per {counted}"


def list_recipe_notes(asked: "JobWithOrigins", folder: Path) -> Iterator[str]:
    """Say what a finished run of a recipe can be used for."""
    from meshwright.run.posttrain.supervised.recipe_config import get_recipe_name

    job = _recipe(asked)
    words = ["mw", "convert", str(folder), "FOLDER"]
    if get_recipe_name(job.recipe) == "reward":
        # What would be served of it are its words, and not its rewards.
        words += ["--merge-adapter"] if job.adapter is not None else []
        yield f"{shlex.join(words)} writes the reward model"
        yield "mw evaluate FOLDER PAIRS tells how often it prefers the chosen answer"
        return
    if job.adapter is None:
        yield f"{shlex.join(words)} writes the model"
        return
    yield from list_adapter_notes(folder, job.initial_load_path or "MODEL", job.adapter.rank)


def list_adapter_notes(folder: Path, model: str, rank: int) -> Iterator[str]:
    """Say what the adapter of a finished run can be used for."""
    adapter = folder / "adapter"
    words = ["mw", "serve", model, "--lora-modules", f"own={adapter}"]
    if rank > 16:
        words += ["--max-lora-rank", str(rank)]
    yield f"wrote {adapter}; {shlex.join(words)} serves it beside the model"
    merged = shlex.join(["mw", "convert", str(folder), "FOLDER", "--merge-adapter"])
    yield f"{merged} writes the model with the adapter in it"


def format_evaluation(held_out: Mapping[str, float]) -> dict[str, Any]:
    """Return what held-out records told beside their loss, for people."""
    return {
        f"held-out {name.removeprefix('eval_').replace('_', ' ')}": f"{value:.4g}"
        for name, value in held_out.items()
        if math.isfinite(value)  # a margin needs answers of both labels
    }
