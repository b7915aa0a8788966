"""Files of recipes: a job file with a `[recipe]`, or a model's path and words of a command line.

Where a value is not given, the recipe has one of its own; `mw train --dry-run` says which.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.posttrain.adapters.settings import AdapterSettings, with_listed_targets
from meshwright.run.posttrain.supervised.job import RecipeJob
from meshwright.run.posttrain.supervised.settings import KINDS, ChatSettings, Recipe
from meshwright.run.serve.model.gguf_file import GgufFile, is_gguf
from meshwright.run.serve.model.gguf_weights import model_of
from meshwright.run.train.job_file import (
    BESIDE,
    COMMAND_LINE,
    PARTS,
    AskedJob,
    beside,
    listed,
    located,
    read_job,
)
from meshwright.run.train.paths import whole_path
from meshwright.spec.files import FORMATS, load_data
from meshwright.spec.names import suggestion, unknown_name
from meshwright.spec.read import read
from meshwright.spec.resolve import Resolved, Source, resolve
from meshwright.spec.work import read_model

LENGTH = 2048
"""Positions of a sequence where nobody says, if the model has as many."""

_RATES = {"sft": 2e-5, "lora": 2e-4, "dora": 2e-4, "dpo": 1e-6, "ipo": 1e-6, "kto": 1e-6,
          "reward": 1e-5, "distil": 2e-5}  # fmt: skip
"""Learning rates where nobody says: tenfold for adapters of others than lora and dora."""

_OWN = ("recipe", "chats", "adapter", "epochs")


def is_model(path: Path) -> bool:
    """Tell whether a path is a model to begin with, rather than a job's file."""
    return is_gguf(path) or (path / "config.json").is_file()


def ask_recipe(
    path: str | Path, changes: Mapping[str, Any] | None = None, *, kind: str | None = None
) -> AskedJob:
    """Read a recipe's job from its file, or begin with the model that lies at a path.

    `kind` takes the place of the file's. Every problem names where its value was given.
    """
    path = Path(path)
    file: dict[str, Any] = {"start_from": str(path)}
    if not is_model(path):
        if path.suffix not in FORMATS:
            fix = "name a Hugging Face folder, a .gguf file, a TOML file or a run"
            raise InputError([Problem(str(path), "is neither a model nor a job", fix)])
        file = _words_beside(path.parent, beside(path.parent, load_data(path)))
    asked = _listed(changes or {})
    kind = _kind(kind, file, asked, str(path))
    adapted = "adapter" in file or "adapter" in asked
    merged = resolve(
        [
            Source(f"recipe {kind}", _defaults(kind, adapted=adapted)),
            Source(str(path), file),
            Source("--recipe", {"recipe": {"kind": kind}}),
            Source(COMMAND_LINE, asked),
        ]
    )
    merged = _one_length(merged)
    try:
        job = read_recipe(merged.data)
    except InputError as error:
        raise InputError(
            located(problem, merged.origins, str(path)) for problem in error.problems
        ) from None
    return AskedJob(job, merged.origins)


def read_recipe(data: Mapping[str, Any]) -> RecipeJob:
    """Read a recipe's job from plain data, listing every problem at once."""
    problems: list[Problem] = []
    own: dict[str, Any] = {}
    for name, kind in (("recipe", Recipe), ("chats", ChatSettings), ("adapter", AdapterSettings),
                       ("epochs", float)):  # fmt: skip
        if name in data:
            try:
                own[name] = read(kind, data[name], name)  # type: ignore[arg-type]
            except InputError as error:
                problems += error.problems
    rest = {name: value for name, value in data.items() if name not in _OWN}
    known = (*PARTS, *_OWN)
    for name in [each for each in rest if each not in (*known, *BESIDE)]:
        del rest[name]
        problems.append(unknown_name("part", name, known, name))
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
        problems.append(Problem("recipe", "is missing", f"use one of {', '.join(KINDS)}"))
    if problems:
        raise InputError(problems)
    fields = {name: getattr(job, name) for name in job.__struct_fields__}
    if own.get("adapter") is not None and data["recipe"].get("kind") == "dora":
        own["adapter"] = msgspec.structs.replace(own["adapter"], dora=True)
    try:
        return RecipeJob(**fields, **own)
    except InputError as error:
        raise InputError([*error.problems]) from None


def _one_length(merged: Resolved) -> Resolved:
    """Let a length on the command line take the place of one that the file gives otherwise."""
    data, origins = merged
    given = {name: origins.get(name) for name in ("epochs", "workload.tokens")}
    if "epochs" not in data or not _tokens_given(data) or len(set(given.values())) == 1:
        return merged
    weaker = next(name for name, origin in given.items() if origin != COMMAND_LINE)
    origins = {name: origin for name, origin in origins.items() if name != weaker}
    if weaker == "epochs":
        return Resolved({name: data[name] for name in data if name != "epochs"}, origins)
    workload = {name: value for name, value in data["workload"].items() if name != "tokens"}
    return Resolved({**data, "workload": workload}, origins)


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
            if given is not None and given not in KINDS:
                raise InputError(
                    [Problem(where, f"{given!r} is no recipe", suggestion(given, KINDS))]
                )
    if given is None:
        what = "is missing: nothing says what shall be trained"
        raise InputError([Problem("recipe", what, f"use --recipe with one of {', '.join(KINDS)}")])
    if given not in KINDS:
        raise InputError([Problem("--recipe", f"{given!r} is no recipe", suggestion(given, KINDS))])
    return given


def _defaults(kind: str, *, adapted: bool) -> dict[str, Any]:
    """Return what a recipe sets where nobody else does."""
    beside_weights = kind in ("lora", "dora")
    rate = _RATES[kind] * (10 if adapted and not beside_weights else 1)
    found: dict[str, Any] = {
        "workload": {"global_batch": 16},
        "optimizer": {"lr": rate, "decay": 0.0, "warmup_steps": 0},
    }
    if beside_weights:
        found["adapter"] = {"dora": kind == "dora"}
    return found


def _model(data: Mapping[str, Any]) -> object:
    """Return the model: the file's, or that of the weights that the run begins with."""
    start = data.get("start_from")
    if "model" in data:
        return read_model(data["model"], "model")
    if not isinstance(start, str):
        fix = "set start_from to a model's folder or GGUF file, or name a model"
        raise InputError([Problem("start_from", "is missing", fix)])
    if is_gguf(Path(start)):
        with GgufFile(start) as file:
            return model_of(file)
    if not Path(start).is_dir():
        fix = "give a Hugging Face folder or a .gguf file"
        raise InputError([Problem("start_from", f"there is no {start}", fix)])
    return read_model(start, "model")


def _workload(data: Mapping[str, Any], model: Any, own: dict[str, Any]) -> object:
    """Return the workload with what recipes need not be told."""
    given = data.get("workload")
    if not isinstance(given, Mapping):
        return given
    given = dict(given)
    given.setdefault("sequence_length", min(LENGTH, model.max_positions or LENGTH))
    if "tokens" not in given:
        # How many there are is known once the data are read.
        given["tokens"] = 1
        own.setdefault("epochs", 1.0)
    return given


def _listed(changes: Mapping[str, Any]) -> dict[str, Any]:
    return with_listed_targets(_words_beside(Path(), listed(changes)))


def _words_beside(folder: Path, data: dict[str, Any]) -> dict[str, Any]:
    """Let the path of a tokenizer count from a folder."""
    chats = data.get("chats")
    if not isinstance(chats, Mapping) or not isinstance(chats.get("words"), str):
        return data
    whole = whole_path(str(folder / chats["words"]))
    return {**data, "chats": {**chats, "words": whole}}
