"""Files of recipes: a job file with a `[recipe]`, or a model's path and words of a command line.

Where a value is not given, the recipe has one of its own; `mw train --dry-run` says which.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.lora.lora_config import (
    AdapterConfig,
    rename_peft_fields,
    split_target_list,
)
from meshwright.run.posttrain.supervised.recipe_config import RECIPE_NAMES, ChatDataConfig, Recipe
from meshwright.run.posttrain.supervised.recipe_job import RecipeJob
from meshwright.run.serve.model.gguf_file import GgufFile, is_gguf
from meshwright.run.serve.model.gguf_weights import model_from_gguf
from meshwright.run.train.job.job_file import (
    COMMAND_LINE,
    JOB_TABLES,
    RECIPE_KEYS,
    JobWithOrigins,
    add_problem_origin,
    parse_list_values,
    read_job,
    resolve_paths,
)
from meshwright.run.train.run_folder.paths import make_absolute_path
from meshwright.spec.config_sources import ConfigSource, ResolvedConfig, merge_sources
from meshwright.spec.file_formats import FORMATS, load_data
from meshwright.spec.job_spec import read_model
from meshwright.spec.name_suggestions import build_unknown_name_problem, format_suggestion
from meshwright.spec.serialization import decode

DEFAULT_SEQUENCE_LENGTH = 2048
"""Positions of a sequence where nobody says, if the model has as many."""

_RATES = {"sft": 2e-5, "lora": 2e-4, "dora": 2e-4, "dpo": 1e-6, "ipo": 1e-6, "kto": 1e-6,
          "reward": 1e-5, "distillation": 2e-5}  # fmt: skip
"""Learning rates where nobody says: tenfold for adapters of others than lora and dora."""

_OWN = ("recipe", "chats", "adapter", "epochs")


def is_model_path(path: Path) -> bool:
    """Tell whether a path is a model to begin with, rather than a job's file."""
    return is_gguf(path) or (path / "config.json").is_file()


def load_recipe(
    path: str | Path, changes: Mapping[str, Any] | None = None, *, kind: str | None = None
) -> JobWithOrigins:
    """Read a recipe's job from its file, or begin with the model that lies at a path.

    `kind` takes the place of the file's. Every problem names where its value was given.
    """
    path = Path(path)
    file: dict[str, Any] = {"initial_load_path": str(path)}
    if not is_model_path(path):
        if path.suffix not in FORMATS:
            fix = "name a Hugging Face folder, a .gguf file, a TOML file or a run"
            raise InputError([Problem(str(path), "is neither a model nor a job", fix)])
        file = resolve_paths(path.parent, rename_peft_fields(load_data(path)))
        file = _words_beside(path.parent, file)
    asked = _listed(changes or {})
    kind = _kind(kind, file, asked, str(path))
    adapted = "adapter" in file or "adapter" in asked
    merged = merge_sources(
        [
            ConfigSource(f"recipe {kind}", _defaults(kind, adapted=adapted)),
            ConfigSource(str(path), file),
            ConfigSource("--recipe", {"recipe": {"kind": kind}}),
            ConfigSource(COMMAND_LINE, asked),
        ]
    )
    merged = _one_length(merged)
    try:
        job = parse_recipe(merged.data)
    except InputError as error:
        raise InputError(
            add_problem_origin(problem, merged.origins, str(path)) for problem in error.problems
        ) from None
    return JobWithOrigins(job, merged.origins)


def parse_recipe(data: Mapping[str, Any]) -> RecipeJob:
    """Read a recipe's job from plain data, listing every problem at once."""
    data = rename_peft_fields(data)
    problems: list[Problem] = []
    own: dict[str, Any] = {}
    for name, kind in (("recipe", Recipe), ("chats", ChatDataConfig), ("adapter", AdapterConfig),
                       ("epochs", float)):  # fmt: skip
        if name in data:
            try:
                own[name] = decode(kind, data[name], name)  # type: ignore[arg-type]
            except InputError as error:
                problems += error.problems
    rest = {name: value for name, value in data.items() if name not in _OWN}
    known = (*JOB_TABLES, *_OWN)
    for name in [each for each in rest if each not in (*known, *RECIPE_KEYS)]:
        del rest[name]
        problems.append(build_unknown_name_problem("part", name, known, name))
    if "epochs" in data and _tokens_given(data):
        what = "stands beside workload.tokens, and both say how long the run is"
        problems.append(Problem("epochs", what, "give one of them"))
    try:
        rest["model"] = _model(rest)
        rest["workload"] = _workload(rest, rest["model"], own)
        job = read_job(rest)
    except InputError as error:
        problems += [_of_records(problem) for problem in error.problems]
    if "recipe" not in data:
        problems.append(Problem("recipe", "is missing", f"use one of {', '.join(RECIPE_NAMES)}"))
    if problems:
        raise InputError(problems)
    fields = {name: getattr(job, name) for name in job.__struct_fields__}
    if own.get("adapter") is not None and data["recipe"].get("kind") == "dora":
        own["adapter"] = msgspec.structs.replace(own["adapter"], dora=True)
    try:
        return RecipeJob(**fields, **own)
    except InputError as error:
        raise InputError([*error.problems]) from None


def _one_length(merged: ResolvedConfig) -> ResolvedConfig:
    """Let a length on the command line take the place of one that the file gives otherwise."""
    data, origins = merged
    given = {name: origins.get(name) for name in ("epochs", "workload.tokens")}
    if "epochs" not in data or not _tokens_given(data) or len(set(given.values())) == 1:
        return merged
    weaker = next(name for name, origin in given.items() if origin != COMMAND_LINE)
    origins = {name: origin for name, origin in origins.items() if name != weaker}
    if weaker == "epochs":
        return ResolvedConfig({name: data[name] for name in data if name != "epochs"}, origins)
    workload = {name: value for name, value in data["workload"].items() if name != "tokens"}
    return ResolvedConfig({**data, "workload": workload}, origins)


def _tokens_given(data: Mapping[str, Any]) -> bool:
    workload = data.get("workload")
    return isinstance(workload, Mapping) and "tokens" in workload


def _of_records(problem: Problem) -> Problem:
    """Say of data that are missing what recipes read, which is not text."""
    if problem.where == "data" and problem.what == "is missing":
        return problem._replace(fix="name files of records: data.sources=chats.jsonl")
    return problem


def _kind(given: str | None, file: Mapping[str, Any], asked: Mapping[str, Any], path: str) -> str:
    for where, data in (("recipe.kind", asked), (f"{path}: recipe.kind", file)):
        table = data.get("recipe")
        if given is None and isinstance(table, Mapping):
            given = table.get("kind")
            if given is not None and given not in RECIPE_NAMES:
                raise InputError(
                    [
                        Problem(
                            where, f"{given!r} is no recipe", format_suggestion(given, RECIPE_NAMES)
                        )
                    ]
                )
    if given is None:
        what = "is missing: nothing says what shall be trained"
        raise InputError(
            [Problem("recipe", what, f"use --recipe with one of {', '.join(RECIPE_NAMES)}")]
        )
    if given not in RECIPE_NAMES:
        raise InputError(
            [Problem("--recipe", f"{given!r} is no recipe", format_suggestion(given, RECIPE_NAMES))]
        )
    return given


def _defaults(kind: str, *, adapted: bool) -> dict[str, Any]:
    """Return what a recipe sets where nobody else does."""
    beside_weights = kind in ("lora", "dora")
    rate = _RATES[kind] * (10 if adapted and not beside_weights else 1)
    found: dict[str, Any] = {
        "workload": {"global_batch": 16},
        "optimizer": {"lr": rate, "weight_decay": 0.0, "warmup_steps": 0},
    }
    if beside_weights:
        found["adapter"] = {"dora": kind == "dora"}
    return found


def _model(data: Mapping[str, Any]) -> object:
    """Return the model: the file's, or that of the weights that the run begins with."""
    start = data.get("initial_load_path")
    if "model" in data:
        return read_model(data["model"], "model")
    if not isinstance(start, str):
        fix = "set initial_load_path to a model's folder or GGUF file, or name a model"
        raise InputError([Problem("initial_load_path", "is missing", fix)])
    if is_gguf(Path(start)):
        with GgufFile(start) as file:
            return model_from_gguf(file)
    if not Path(start).is_dir():
        fix = "give a Hugging Face folder or a .gguf file"
        raise InputError([Problem("initial_load_path", f"there is no {start}", fix)])
    return read_model(start, "model")


def _workload(data: Mapping[str, Any], model: Any, own: dict[str, Any]) -> object:
    """Return the workload with what recipes need not be told."""
    given = data.get("workload")
    if not isinstance(given, Mapping):
        return given
    given = dict(given)
    given.setdefault(
        "sequence_length",
        min(DEFAULT_SEQUENCE_LENGTH, model.max_positions or DEFAULT_SEQUENCE_LENGTH),
    )
    if "tokens" not in given:
        # How many there are is known once the data are read.
        given["tokens"] = 1
        own.setdefault("epochs", 1.0)
    return given


def _listed(changes: Mapping[str, Any]) -> dict[str, Any]:
    changes = rename_peft_fields(parse_list_values(changes))
    return split_target_list(_words_beside(Path(), changes))


def _words_beside(folder: Path, data: dict[str, Any]) -> dict[str, Any]:
    """Let the path of a tokenizer count from a folder."""
    chats = data.get("chats")
    if not isinstance(chats, Mapping) or not isinstance(chats.get("tokenizer"), str):
        return data
    whole = make_absolute_path(str(folder / chats["tokenizer"]))
    return {**data, "chats": {**chats, "tokenizer": whole}}
