"""Job files: one TOML file, with changes from the command line laid over it, read into a `Job`.

Every problem of a file is listed at once, with the file, the path and a fix.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.train.checkpoint.settings import CheckpointSettings
from meshwright.run.train.data.settings import DataSettings
from meshwright.run.train.guards import GuardSettings
from meshwright.run.train.job import EvaluationSettings, ExpertSettings, Job, MachineSettings
from meshwright.run.train.job_check import problems_of
from meshwright.run.train.loss import LossSettings
from meshwright.run.train.optimizer.settings import OptimizerSettings
from meshwright.run.train.outputs.settings import OutputSettings
from meshwright.spec.bounds import require, whole
from meshwright.spec.files import FORMATS, dump_data, load_data
from meshwright.spec.layout import Layout
from meshwright.spec.names import unknown_name
from meshwright.spec.read import plain, read
from meshwright.spec.resolve import Source, origin_of, resolve
from meshwright.spec.work import read_model
from meshwright.spec.workload import Training


class AskedJob(NamedTuple):
    """A job with who set each of its values: the file, or the command line."""

    job: Job
    origins: dict[str, str]
    """By path; a value that is not there has its default."""

    def origin(self, path: str) -> str:
        """Name who set a value, or filled in a table."""
        return origin_of(path, self.origins)


PARTS = tuple(field.name for field in msgspec.structs.fields(Job))
"""The tables and values of a job file."""

BESIDE = ("cluster", "gpus", "recipe", "chats", "adapter", "epochs")
"""What other commands read from the same file, and recipes of post-training."""

COMMAND_LINE = "command line"

_NO_PATHS = ("standard", "bytes")
"""Words that stand where a path could: built-in text and the built-in tokenizer."""

_KINDS: dict[str, type[msgspec.Struct]] = {
    "layout": Layout,
    "workload": Training,
    "data": DataSettings,
    "optimizer": OptimizerSettings,
    "loss": LossSettings,
    "experts": ExpertSettings,
    "evaluation": EvaluationSettings,
    "checkpoint": CheckpointSettings,
    "output": OutputSettings,
    "guards": GuardSettings,
    "machine": MachineSettings,
}

_MISSING = {
    "model": 'add model = "…", a name of mw models, or a [model] table',
    "workload": "add [workload] with tokens, sequence_length and global_batch",
    "data": "add [data] with sources; mw data tokenize makes them",
}


def ask_job(path: str | Path, changes: Mapping[str, Any] | None = None) -> AskedJob:
    """Read a job file with changes laid over it; every problem names its file and path.

    Paths in the file count from its folder, those in changes from the working directory.
    """
    path = Path(path)
    sources = [
        Source(str(path), beside(path.parent, load_data(path))),
        Source(COMMAND_LINE, listed(changes or {})),
    ]
    merged = resolve(sources)
    try:
        job = read_job(merged.data)
    except InputError as error:
        raise InputError(
            located(problem, merged.origins, str(path)) for problem in error.problems
        ) from None
    return AskedJob(job, merged.origins)


def load_job(path: str | Path, changes: Mapping[str, Any] | None = None) -> Job:
    """Read a job file, with changes laid over it."""
    return ask_job(path, changes).job


def read_job(data: Mapping[str, Any]) -> Job:
    """Read a job from plain data, listing every problem of all its tables at once."""
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name in BESIDE:
            continue
        if name not in PARTS:
            problems.append(unknown_name("part", name, PARTS, name))
            continue
        try:
            values[name] = _part(name, value)
        except InputError as error:
            problems += error.problems
    problems += [
        Problem(name, "is missing", fix) for name, fix in _MISSING.items() if name not in data
    ]
    # What could be read is held against the rest, so that a file is mended once.
    layout = values.get("layout", None if "layout" in data else Layout())
    machine = values.get("machine", MachineSettings())
    experts = values.get("experts", ExpertSettings())
    problems += problems_of(
        values.get("model"),
        layout,
        values.get("workload"),
        machine.algorithms,
        capacity_factor=experts.capacity_factor,
    )
    if problems:
        raise InputError(problems)
    return Job(**values)


def _part(name: str, value: object) -> object:
    if name == "model":
        return read_model(value, name)
    if name == "workload" and isinstance(value, Mapping):
        kind = value.get("kind", "training")
        if kind != "training":
            what = f"is a workload of kind {kind!r}, and only training trains"
            raise InputError([Problem("workload.kind", what, 'use "training", or leave it out')])
        value = {**value, "kind": "training"}
    if name in _KINDS:
        return read(_KINDS[name], value, name)
    if name == "start_from":
        return read(str, value, name)
    seed = read(int, value, name)
    require(whole(name, seed, 0, 2**63 - 1))
    return seed


def located(problem: Problem, origins: Mapping[str, str], file: str) -> Problem:
    """Say where a bad value was written: in the file, or on the command line."""
    path = problem.where
    tops = {*PARTS, *(known.partition(".")[0] for known in origins)}
    if re.split(r"[.\[]", path, maxsplit=1)[0] not in tops:
        return problem  # a problem of another file, which it names
    origin = next(
        (
            origin
            for known, origin in origins.items()
            if path == known or path.startswith((f"{known}.", f"{known}["))
        ),
        None,
    )
    if origin is None:  # a table, which its first value tells the home of
        inside = (origin for known, origin in origins.items() if known.startswith(f"{path}."))
        origin = next(inside, file)
    return problem._replace(where=f"{origin}: {path}")


def listed(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Let text stand for a list where one belongs, as a shell leaves it: `a,b` and `[a, b]`."""
    found = dict(changes)
    for part, kind in _KINDS.items():
        if not isinstance(values := found.get(part), Mapping):
            continue
        lists = {one.name for one in msgspec.structs.fields(kind) if "tuple" in str(one.type)}
        found[part] = {
            name: _words(value) if name in lists and isinstance(value, str) else value
            for name, value in values.items()
        }
    return found


def _words(text: str) -> list[str]:
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    return [word.strip() for word in inner.split(",") if word.strip()]


def beside(folder: Path, data: dict[str, Any]) -> dict[str, Any]:
    """Let the paths in a file's data count from the file's own folder."""
    data = dict(data)
    for name in ("model", "cluster"):
        value = data.get(name)
        if isinstance(value, str) and (folder / value).exists():
            is_path = Path(value).suffix in FORMATS or "/" in value or (folder / value).is_dir()
            data[name] = str(folder / value) if is_path else value
    if isinstance(data.get("start_from"), str):
        data["start_from"] = str(folder / data["start_from"])
    if isinstance(data.get("data"), Mapping):
        data["data"] = _data_beside(folder, data["data"])
    return data


def _data_beside(folder: Path, data: Mapping[str, Any]) -> dict[str, Any]:
    def there(value: object) -> object:
        if isinstance(value, Mapping):
            return {**value, "path": there(value["path"])} if "path" in value else value
        if not isinstance(value, str) or not value or value.partition(":")[0] in _NO_PATHS:
            return value
        return str(folder / value)

    moved = dict(data)
    for name in ("sources", "validation_sources"):
        if isinstance(moved.get(name), list):
            moved[name] = [there(one) for one in moved[name]]
    for name in ("tokenizer", "cache"):
        if name in moved:
            moved[name] = there(moved[name])
    return moved


def dump_job(job: Job) -> str:
    """Write a job as a file that says the same wherever it lies: its paths are whole."""
    here = Path(os.path.abspath(Path.cwd()))  # noqa: PTH100 - links stay as they are
    return dump_data(beside(here, plain(job)), ".toml")
