"""Work descriptions on the command line: files, environment and flags become one `JobSpec`."""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshwright.cli.flags.problems import (
    ARGUMENT,
    ENVIRONMENT,
    FLAG,
    find_violations,
    locate_problem,
)
from meshwright.cli.flags.recipe_work import work_from_recipe
from meshwright.cli.flags.spec_fields import (
    add_fields,
    coerce_values,
    read_environment,
    read_flag_values,
)
from meshwright.cli.result import CommandResult, make_table
from meshwright.errors import InputError, Problem
from meshwright.spec.config_sources import ConfigSource, ResolvedConfig, merge_sources
from meshwright.spec.field_docs import list_field_docs
from meshwright.spec.file_formats import FORMATS, load_data
from meshwright.spec.job_spec import SECTIONS, JobSpec, read_job_spec
from meshwright.spec.layout import Layout
from meshwright.spec.workload import TrainingWorkload

WORK_PARTS: tuple[tuple[str, type[msgspec.Struct]], ...] = (
    ("layout", Layout),
    ("workload", TrainingWorkload),
)
NAMES = ("model", "cluster", "gpus")
WORKLOAD_FLAGS = ("sequence_length", "tokens", "adapter", "expert_imbalance")
DEFAULT_SEQUENCE_LENGTH = 4096


class ResolvedWork(NamedTuple):
    """A work description with the origin of each value."""

    work: JobSpec
    workload: TrainingWorkload
    """The workload, filled in where nothing was asked: one step of a short run."""
    origins: dict[str, str]


def add_work(parser: argparse.ArgumentParser) -> None:
    """Add what describes the work: files, the four parts, and every field of a layout."""
    parser.add_argument(
        "files", nargs="*", metavar="WORK",
        help="work files, later ones win; or a model: catalog name, TOML file, folder",
    )  # fmt: skip
    group = parser.add_argument_group("work")
    group.add_argument("--model", help="catalog name, TOML file, or a folder with config.json")
    group.add_argument("--cluster", help="catalog name or TOML file")
    group.add_argument("--gpus", metavar="N", help="GPUs to use; sets dp where dp is not given")
    group.add_argument(
        "--dry-run", action="store_true", help="show every value and where it came from, and stop"
    )
    add_fields(parser, Layout, "layout")
    add_fields(parser, TrainingWorkload, "workload", WORKLOAD_FLAGS)


def resolve_work(
    args: argparse.Namespace, environment: Mapping[str, str] = os.environ
) -> ResolvedWork:
    """Resolve the work that files, environment and flags describe."""
    merged = merge_sources(_sources(args, environment))
    filled, origins = _filled(merged)
    try:
        work = read_job_spec(filled)
    except InputError as error:
        found = (*error.problems, *find_violations(filled, error.problems))
        raise InputError(locate_problem(problem, origins) for problem in found) from None
    if not isinstance(work.workload, TrainingWorkload):
        what, fix = "is a stream of requests, not a training run", 'set kind = "training"'
        raise InputError([Problem("workload", what, fix)])
    workload = _fitted(work, work.workload, origins)
    return ResolvedWork(msgspec.structs.replace(work, workload=workload), workload, origins)


def require_valid_layout(resolved: ResolvedWork) -> None:
    """Refuse to predict what cannot be laid out; memory itself is the question, not a fault."""
    problems = [problem for problem in resolved.work.check() if problem.where != "memory"]
    if problems:
        raise InputError(locate_problem(problem, resolved.origins) for problem in problems)


def _sources(args: argparse.Namespace, environment: Mapping[str, str]) -> list[ConfigSource]:
    sources, models = _positional(args.files, args.model)
    variables: dict[str, Any] = {
        name: environment[f"MESHWRIGHT_{name.upper()}"]
        for name in NAMES
        if f"MESHWRIGHT_{name.upper()}" in environment
    }
    flags: dict[str, Any] = {
        name: getattr(args, name) for name in NAMES if getattr(args, name) is not None
    }
    for part, kind in WORK_PARTS:
        for into, values in (
            (variables, read_environment(kind, part, environment)),
            (flags, coerce_values(kind, read_flag_values(args, part))),
        ):
            if values:
                into[part] = values
    for into in (variables, flags):
        # The batch of a step has two homes, the layout that splits it and the workload that asks
        # for it; said on the command line, it is meant for both.
        batch = into.get("layout", {}).get("global_batch")
        if batch is not None:
            into.setdefault("workload", {}).setdefault("global_batch", batch)
    return [*sources, ConfigSource(ENVIRONMENT, variables), *models, ConfigSource(FLAG, flags)]


def _positional(
    words: list[str], model: str | None
) -> tuple[list[ConfigSource], list[ConfigSource]]:
    """Tell work files from models among the words given without a flag."""
    files, models = [], []
    for word in words:
        path = Path(word)
        if path.suffix.lower() not in FORMATS or path.name == "config.json":
            models.append(word)
            continue
        data = load_data(path)
        if "recipe" in data:
            data = work_from_recipe(word, data)
        # A model's file has fields of its own, and none of the parts of a work.
        if "blocks" in data and not set(data) & set(SECTIONS):
            models.append(word)
        else:
            files.append(ConfigSource(str(path), _beside(word, data)))
    if len(models) + (model is not None) > 1:
        names = [*models, *([model] if model is not None else [])]
        what = f"{len(names)} models are named: {', '.join(names)}"
        raise InputError([Problem("model", what, "name one; files of a work end in .toml")])
    return files, [ConfigSource(ARGUMENT, {"model": word}) for word in models]


def _beside(path: str, data: dict[str, Any]) -> dict[str, Any]:
    """Let paths inside a file count from the file's own folder."""
    folder = Path(path).parent
    for name in ("model", "cluster"):
        value = data.get(name)
        if isinstance(value, str) and (folder / value).exists():
            is_path = Path(value).suffix in FORMATS or "/" in value or (folder / value).is_dir()
            data = {**data, name: str(folder / value)} if is_path else data
    return data


def _filled(merged: ResolvedConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """Complete the workload to a single step where it was left open, so it can be read."""
    data, origins = dict(merged.data), dict(merged.origins)
    workload = data.get("workload")
    if workload is None or isinstance(workload, Mapping):
        layout = data.get("layout")
        batch = layout.get("global_batch") if isinstance(layout, Mapping) else None
        defaults = {
            "sequence_length": DEFAULT_SEQUENCE_LENGTH,
            "global_batch": batch or 1,
            "tokens": 1,
        }
        given_ = dict(workload or {})
        for name, value in defaults.items():
            if name not in given_ and given_.get("kind", "training") == "training":
                given_[name] = value
                from_layout = name == "global_batch" and batch is not None
                origins[f"workload.{name}"] = "layout" if from_layout else "default"
        data["workload"] = given_
    return data, origins


def _fitted(work: JobSpec, workload: TrainingWorkload, origins: dict[str, str]) -> TrainingWorkload:
    """Replace defaults that can only be known with the model and the layout at hand."""
    layout, model = work.layout, work.model
    length, batch = workload.sequence_length, workload.global_batch
    if origins.get("workload.sequence_length") == "default" and model.positions == "learned":
        length = min(length, model.max_positions)
    if origins.get("workload.global_batch") == "default":
        batch = layout.dp * layout.microbatch * layout.pp
    return msgspec.structs.replace(workload, sequence_length=length, global_batch=batch)


def show_sources(resolved: ResolvedWork) -> CommandResult:
    """Show every value of the work with its origin, for `--dry-run`."""
    work = resolved.work
    rows: list[tuple[str, object, str]] = [
        ("model", work.model.name, _origin(resolved, "model")),
        ("cluster", work.cluster.name, _origin(resolved, "cluster")),
        ("gpus", work.layout.gpus, resolved.origins.get("gpus", "from the layout")),
    ]
    for part, value in (("layout", work.layout), ("workload", resolved.workload)):
        for field in list_field_docs(type(value)):
            path = f"{part}.{field.name}"
            origin = _origin(resolved, path)
            if path == "layout.dp" and origin == "default" and "gpus" in resolved.origins:
                origin = f"from gpus ({resolved.origins['gpus']})"
            rows.append((path, msgspec.to_builtins(getattr(value, field.name)), origin))
    data = {"values": [{"field": f, "value": v, "source": s} for f, v, s in rows]}
    shown = [(field, _text(value), source) for field, value, source in rows]
    view = make_table("field, value, source", shown, wide="value, source")
    return CommandResult("work/1", data, (view,), tuple(f"{f}={v}" for f, v, _ in shown))


def _origin(resolved: ResolvedWork, path: str) -> str:
    """Name who set a value; a table that several sources filled in names them all."""
    inside = [
        origin
        for known, origin in resolved.origins.items()
        if known == path or known.startswith(f"{path}.")
    ]
    return ", ".join(dict.fromkeys(inside)) or "default"


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={_text(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return "" if value is None else str(value)
