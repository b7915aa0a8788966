"""`read_outline`: what of a job file can be judged without torch, in a fraction of a second.

`mw launch` may run where there is no torch, and `mw train --nproc-per-node` looks here before it
starts processes that load it. Everything else about a job is for the trainer to say.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from meshwright.cli.flags.overrides import parse_overrides
from meshwright.cli.flags.problems import locate_problem
from meshwright.errors import InputError, Problem
from meshwright.spec import catalog
from meshwright.spec.cluster import Cluster
from meshwright.spec.config_sources import ConfigSource, merge_sources
from meshwright.spec.file_formats import load_data
from meshwright.spec.job_spec import read_cluster, read_model
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.serialization import decode
from meshwright.spec.workload import TrainingWorkload

T = TypeVar("T")

_COMMAND_LINE = "command line"
_STAND_IN = "h100-superpod"
"""The cluster that a layout is held against where it is to run on the machine at hand."""
_OF_CLUSTER = {"dp", "memory", "precision"}
"""What is asked about a cluster: this one only stands in."""


class JobOutline(NamedTuple):
    """The parts of a job that say where it runs; None is one that is not given or not readable."""

    path: Path
    data: dict[str, Any]
    """The file with the words of the command line laid over it."""
    origins: dict[str, str]
    """Who set each value."""
    layout: Layout | None
    cluster: Cluster | None
    model: Model | None
    workload: TrainingWorkload | None
    problems: tuple[Problem, ...]
    """What is wrong with these parts, each with its file or the command line."""

    def locate(self, problem: Problem) -> Problem:
        """Say where a bad value was written; what is no value of the job stays as it is."""
        if problem.where.startswith("-"):
            return problem
        found = locate_problem(problem, self.origins)
        return found if found.where != problem.where else _in_file(problem, self.path)

    def find_layout_problems(self) -> list[Problem]:
        """Return where the layout does not fit the model or the batch, whatever it runs on."""
        if self.layout is None or self.model is None or self.workload is None:
            return []
        cluster = catalog.get_cluster(_STAND_IN)
        found = self.layout.check(self.model, cluster, self.workload)
        return [self.locate(problem) for problem in found if problem.where not in _OF_CLUSTER]

    def find_missing_paths(self) -> list[str]:
        """Return the paths of data that are not there."""
        data = self.data.get("data")
        given = data.get("sources") if isinstance(data, Mapping) else None
        if isinstance(given, str):  # as a shell leaves a list
            given = [word.strip() for word in given.strip("[]").split(",")]
        # Words of a command line count from the working directory.
        origin = self.origins.get("data.sources")
        folder = Path() if origin == _COMMAND_LINE else self.path.parent
        return [
            path
            for path in map(_path, given if isinstance(given, list) else [])
            if path and path.partition(":")[0] != "builtin" and not _is_there(folder / path)
        ]


def read_outline(path: Path, words: Sequence[str], *, with_model: bool = True) -> JobOutline:
    """Read the parts of a job file with `KEY=VALUE` words laid over it."""
    merged = merge_sources(
        [
            ConfigSource(str(path), load_data(path)),
            ConfigSource(_COMMAND_LINE, parse_overrides(words)),
        ]
    )
    data, problems = merged.data, list[Problem]()

    def part(name: str, reader: Callable[[Any], T], otherwise: Any = None) -> T | None:
        value = data.get(name, otherwise)
        try:
            return None if value is None else reader(value)
        except InputError as error:
            problems.extend(error.problems)
            return None

    layout = part("layout", lambda value: decode(Layout, value, "layout"), {})
    cluster = part("cluster", lambda value: read_cluster(resolve_path(path, value), "cluster"))
    model = workload = None
    if with_model:
        model = part("model", lambda value: read_model(resolve_path(path, value), "model"))
        workload = part("workload", _training)
    found = JobOutline(path, data, merged.origins, layout, cluster, model, workload, ())
    return found._replace(problems=tuple(found.locate(problem) for problem in problems))


def resolve_path(path: Path, value: object) -> object:
    """Let a path in a job file count from the file's own folder."""
    if isinstance(value, str) and (path.parent / value).exists():
        return str(path.parent / value)
    return value


def _training(value: object) -> TrainingWorkload:
    if isinstance(value, Mapping):
        value = {**value, "kind": value.get("kind", "training")}
    return decode(TrainingWorkload, value, "workload")


def _in_file(problem: Problem, path: Path) -> Problem:
    return problem._replace(where=f"{path}: {problem.where}")


def _path(source: object) -> str:
    path = source.get("path") if isinstance(source, Mapping) else source
    return path if isinstance(path, str) else ""


def _is_there(place: Path) -> bool:
    """Tell whether text, a folder of tokens or a pair of Megatron's files is at a path."""
    return place.exists() or place.with_name(f"{place.name}.bin").exists()
