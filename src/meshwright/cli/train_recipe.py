"""`mw train --recipe`: recipes of post-training, from a job file or a model's path and words."""

import argparse
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwright.cli.answer import Text
from meshwright.cli.overrides import changed
from meshwright.errors import InputError
from meshwright.spec.files import FORMATS, load_data

if TYPE_CHECKING:
    from meshwright.run.posttrain.supervised.job import RecipeJob
    from meshwright.run.posttrain.supervised.task import RecipeTask
    from meshwright.run.train.job_file import AskedJob

SUPERVISED = ("sft", "lora", "dora", "dpo", "ipo", "kto", "reward", "distil")
RECIPES = (*SUPERVISED, "grpo")
FAMILY = {
    "ppo": "objective.advantage=gae",
    "rloo": "objective.advantage=leave-one-out objective.loss=reinforce",
    "reinforce++": "objective.advantage=whitened",
    "dapo": "spare_prompts=64 objective.high=0.28 objective.overlong_margin=16",
    "gspo": "objective.loss=gspo objective.averaging=sequence",
    "cispo": "objective.loss=cispo",
}
"""Algorithms that are settings of one recipe."""


class Asked(NamedTuple):
    """A recipe that can be trained."""

    asked: "AskedJob"
    task: "RecipeTask"
    data: Text
    """What became of the records."""


def names_recipe(args: argparse.Namespace) -> bool:
    """Tell whether a command line, or the file it names, asks for a recipe."""
    return args.recipe is not None or file_names_recipe(Path(args.job), args.files)


def file_names_recipe(path: Path, words: Sequence[str]) -> bool:
    """Tell whether a job's file, or the words after it, name a recipe."""
    if "recipe" in changed(words):
        return True
    try:
        return path.suffix in FORMATS and path.is_file() and "recipe" in load_data(path)
    except InputError:
        return False  # for whoever reads it as a job to say


def ask(args: argparse.Namespace) -> Asked:
    """Read a recipe and its records."""
    from meshwright.run.posttrain.supervised import ask_recipe, open_recipe

    asked = ask_recipe(args.job, changed(args.files), kind=args.recipe)
    task, job = open_recipe(_recipe(asked))
    told = "\n".join(task.batches(job, rank=0, world=1).figures.lines())
    epochs, origins = _recipe(asked).epochs, dict(asked.origins)
    if epochs is not None:
        where = origins.pop("epochs", "default")
        origins["workload.tokens"] = f"epochs={epochs:g}, {where}"
    return Asked(asked._replace(job=job, origins=origins), task, Text(told))


def _recipe(asked: "AskedJob") -> "RecipeJob":
    from meshwright.run.posttrain.supervised import RecipeJob

    assert isinstance(asked.job, RecipeJob)
    return asked.job


def unit_of(asked: "AskedJob") -> str:
    """Return what a recipe's loss is a mean of."""
    from meshwright.run.posttrain.supervised.settings import COUNTED, name_of

    name = name_of(_recipe(asked).recipe)
    counted = COUNTED.get(name)
    return "nats per token" if counted is None else f"per {counted}"


def remarks(asked: "AskedJob", folder: Path) -> Iterator[str]:
    """Say what a finished run of a recipe can be used for."""
    from meshwright.run.posttrain.supervised.settings import name_of

    job = _recipe(asked)
    words = ["mw", "export", str(folder), "FOLDER"]
    if name_of(job.recipe) == "reward":
        # What would be served of it are its words, and not its rewards.
        words += ["--merge"] if job.adapter is not None else []
        yield f"{shlex.join(words)} writes the reward model"
        yield "mw evaluate FOLDER PAIRS tells how often it prefers the chosen answer"
        return
    if job.adapter is None:
        yield f"{shlex.join(words)} writes the model"
        return
    yield from adapter_remarks(folder, job.start_from or "MODEL", job.adapter.rank)


def adapter_remarks(folder: Path, model: str, rank: int) -> Iterator[str]:
    """Say what the adapter of a finished run can be used for."""
    adapter = folder / "adapter"
    words = ["mw", "serve", model, "--adapter", f"own={adapter}"]
    if rank > 16:
        words += ["--adapter-rank", str(rank)]
    yield f"wrote {adapter}; {shlex.join(words)} serves it beside the model"
    merged = shlex.join(["mw", "export", str(folder), "FOLDER", "--merge"])
    yield f"{merged} writes the model with the adapter in it"


def figures_of(held_out: Mapping[str, float]) -> dict[str, Any]:
    """Return what held-out records told beside their loss, for people."""
    return {
        f"held-out {name.removeprefix('held_out_').replace('_', ' ')}": f"{value:.4g}"
        for name, value in held_out.items()
        if math.isfinite(value)  # a margin needs answers of both labels
    }
