"""Job files: one TOML file with command-line overrides, read into a `TrainJob`.

Every problem of a file is listed at once, with the file, the path and a fix.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.run.train.checkpoint.checkpoint_config import CheckpointConfig
from meshwright.run.train.data.data_config import DataConfig
from meshwright.run.train.job.job_validation import find_job_problems
from meshwright.run.train.job.loss_config import LossConfig
from meshwright.run.train.job.train_job import DeviceConfig, EvalConfig, MoEConfig, TrainJob
from meshwright.run.train.logging.logging_config import LoggingConfig
from meshwright.run.train.loss_guard import LossGuardConfig
from meshwright.run.train.optimizer.optimizer_config import OptimizerConfig
from meshwright.spec.config_sources import ConfigSource, get_source_name, merge_sources
from meshwright.spec.field_checks import check_integer, raise_problems
from meshwright.spec.file_formats import FORMATS, dump_data, load_data
from meshwright.spec.job_spec import read_model
from meshwright.spec.layout import Layout
from meshwright.spec.name_suggestions import build_unknown_name_problem
from meshwright.spec.serialization import decode, encode
from meshwright.spec.workload import TrainingWorkload


class JobWithOrigins(NamedTuple):
    """A job with who set each of its values: the file, or the command line."""

    job: TrainJob
    origins: dict[str, str]
    """By path; a value that is not there has its default."""

    def get_origin(self, path: str) -> str:
        """Name who set a value, or filled in a table."""
        return get_source_name(path, self.origins)


JOB_TABLES = tuple(field.name for field in msgspec.structs.fields(TrainJob))
"""The tables and values of a job file."""

RECIPE_KEYS = ("cluster", "gpus", "recipe", "chats", "adapter", "epochs")
"""What other commands read from the same file, and recipes of post-training."""

COMMAND_LINE = "command line"

_NO_PATHS = ("builtin", "bytes")
"""Words that stand where a path could: built-in text and the built-in tokenizer."""

_KINDS: dict[str, type[msgspec.Struct]] = {
    "layout": Layout,
    "workload": TrainingWorkload,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "loss": LossConfig,
    "moe": MoEConfig,
    "eval": EvalConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "loss_guard": LossGuardConfig,
    "device": DeviceConfig,
}

_MISSING = {
    "model": 'add model = "…", a name of mw models, or a [model] table',
    "workload": "add [workload] with tokens, sequence_length and global_batch",
    "data": "add [data] with sources; mw data tokenize makes them",
}


def read_job_with_origins(
    path: str | Path, changes: Mapping[str, Any] | None = None
) -> JobWithOrigins:
    """Read a job file with changes laid over it; every problem names its file and path.

    Paths in the file count from its folder, those in changes from the working directory.
    """
    path = Path(path)
    sources = [
        ConfigSource(str(path), resolve_paths(path.parent, load_data(path))),
        ConfigSource(COMMAND_LINE, parse_list_values(changes or {})),
    ]
    merged = merge_sources(sources)
    try:
        job = read_job(merged.data)
    except InputError as error:
        raise InputError(
            add_problem_origin(problem, merged.origins, str(path)) for problem in error.problems
        ) from None
    return JobWithOrigins(job, merged.origins)


def load_job(path: str | Path, changes: Mapping[str, Any] | None = None) -> TrainJob:
    """Read a job file, with changes laid over it."""
    return read_job_with_origins(path, changes).job


def read_job(data: Mapping[str, Any]) -> TrainJob:
    """Read a job from plain data, listing every problem of all its tables at once."""
    problems: list[Problem] = []
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name in RECIPE_KEYS:
            continue
        if name not in JOB_TABLES:
            problems.append(build_unknown_name_problem("part", name, JOB_TABLES, name))
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
    device = values.get("device", DeviceConfig())
    moe = values.get("moe", MoEConfig())
    problems += find_job_problems(
        values.get("model"),
        layout,
        values.get("workload"),
        device.collective_algorithms,
        capacity_factor=moe.capacity_factor,
    )
    if problems:
        raise InputError(problems)
    return TrainJob(**values)


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
        return decode(_KINDS[name], value, name)
    if name == "initial_load_path":
        return decode(str, value, name)
    seed = decode(int, value, name)
    raise_problems(check_integer(name, seed, 0, 2**63 - 1))
    return seed


def add_problem_origin(problem: Problem, origins: Mapping[str, str], file: str) -> Problem:
    """Say where a bad value was written: in the file, or on the command line."""
    path = problem.where
    tops = {*JOB_TABLES, *(known.partition(".")[0] for known in origins)}
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


def parse_list_values(changes: Mapping[str, Any]) -> dict[str, Any]:
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


def resolve_paths(folder: Path, data: dict[str, Any]) -> dict[str, Any]:
    """Let the paths in a file's data count from the file's own folder."""
    data = dict(data)
    for name in ("model", "cluster"):
        value = data.get(name)
        if isinstance(value, str) and (folder / value).exists():
            is_path = Path(value).suffix in FORMATS or "/" in value or (folder / value).is_dir()
            data[name] = str(folder / value) if is_path else value
    if isinstance(data.get("initial_load_path"), str):
        data["initial_load_path"] = str(folder / data["initial_load_path"])
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
    for name in ("tokenizer", "cache_dir"):
        if name in moved:
            moved[name] = there(moved[name])
    return moved


def dump_job(job: TrainJob) -> str:
    """Write a job as a file that says the same wherever it lies: its paths are whole."""
    here = Path(os.path.abspath(Path.cwd()))  # noqa: PTH100 - links stay as they are
    return dump_data(resolve_paths(here, encode(job)), ".toml")
