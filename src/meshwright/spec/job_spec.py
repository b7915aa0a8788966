"""`JobSpec`: the one description, Model × Cluster × Layout × Workload, as it stands in a file.

In a file the model and the cluster may be a catalog name, a path, or written out.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec import catalog
from meshwright.spec.cluster import Cluster
from meshwright.spec.file_formats import FORMATS, load
from meshwright.spec.layout import Layout
from meshwright.spec.layout.field_rules import nearest_multiple
from meshwright.spec.model import Model
from meshwright.spec.model.huggingface import load_config
from meshwright.spec.name_suggestions import build_unknown_name_problem
from meshwright.spec.serialization import decode, format_value
from meshwright.spec.workload import TrainingWorkload, Workload, read_workload

T = TypeVar("T")

SECTIONS = ("model", "cluster", "layout", "workload", "gpus")
"""What a work file may hold."""

TRAINER_SECTIONS = (
    "data", "optimizer", "loss", "moe", "eval", "checkpoint", "logging", "loss_guard", "device",
    "initial_load_path", "seed",
)  # fmt: skip
"""What else a file of `mw train` holds: it tells nothing of the work, and is passed over."""


class JobSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to be done: this model on this cluster, laid out so, for this workload."""

    model: Model
    """The architecture."""
    cluster: Cluster
    """The hardware."""
    layout: Layout = Layout()
    """How the one lies on the other."""
    workload: Workload | None = None
    """What is asked of it."""

    def check(self) -> tuple[Problem, ...]:
        """Return every violated constraint, each with a fix."""
        training = self.workload if isinstance(self.workload, TrainingWorkload) else None
        return self.layout.check(self.model, self.cluster, training)


class _Reader:
    """Reads the parts of a work description, collecting the problems of all of them."""

    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self.data, self.where = data, where
        self.problems: list[Problem] = []

    def part(self, name: str, reader: Callable[[object, str], T]) -> T | None:
        """Read one part where it is given."""
        if self.data.get(name) is None:
            return None
        try:
            return reader(self.data[name], f"{self.where}{name}")
        except InputError as error:
            self.problems += error.problems
            return None

    def add(self, name: str, what: str, fix: str) -> None:
        """List a problem of one part."""
        self.problems.append(Problem(f"{self.where}{name}", what, fix))


def read_job_spec(data: Mapping[str, Any], where: str = "") -> JobSpec:
    """Read a work description, listing every problem of all four parts at once.

    `gpus` beside them fills in `layout.dp` where that is not given. A catalog cluster is made
    just large enough; one that is written out or in a file has the nodes it has.
    """
    reader = _Reader(data, where)
    for name in ("model", "cluster"):
        if data.get(name) is None:
            reader.add(name, "is missing", f'add {name} = "…", a name of mw {name}s')
    for key in data:
        if key not in SECTIONS and key not in TRAINER_SECTIONS:
            reader.problems.append(
                build_unknown_name_problem("part", str(key), SECTIONS, f"{where}{key}")
            )
    gpus = reader.part("gpus", lambda value, at: decode(int, value, at))
    if gpus is not None and gpus < 1:
        reader.add("gpus", f"{gpus} is not a number of GPUs", "use 1 or more")
        gpus = None
    model = reader.part("model", read_model)
    cluster = reader.part("cluster", read_cluster)
    workload = reader.part("workload", _read_workload)
    layout = _read_layout(reader, gpus)
    if cluster is not None and layout is not None and isinstance(data["cluster"], str):
        cluster = _sized(reader, cluster, gpus or layout.gpus)
    if reader.problems or model is None or cluster is None or layout is None:
        raise InputError(reader.problems)
    return JobSpec(model=model, cluster=cluster, layout=layout, workload=workload)


def _read_workload(value: object, where: str) -> Workload:
    """Read a workload; a training run need not name its kind."""
    if isinstance(value, Mapping) and "kind" not in value:
        value = {"kind": "training", **value}
    return read_workload(value, where)


def _sized(reader: _Reader, cluster: Cluster, gpus: int) -> Cluster:
    if Path(reader.data["cluster"]).suffix in FORMATS:
        return cluster
    try:
        return cluster.with_gpus(gpus)
    except InputError as error:
        for problem in error.problems:
            reader.add("gpus", problem.what, problem.fix)
        return cluster


def _read_layout(reader: _Reader, gpus: int | None) -> Layout | None:
    """Read the layout; `gpus` gives the data-parallel degree that it leaves open."""
    data = reader.data.get("layout") or {}
    if gpus is not None and isinstance(data, Mapping) and "dp" not in data:
        try:
            rest = decode(Layout, {k: v for k, v in data.items() if k in ("tp", "cp", "pp")})
        except InputError:
            pass  # the layout's own problems are listed below
        else:
            if gpus % rest.gpus:
                what = f"{gpus} is not a multiple of tp × cp × pp = {rest.gpus}"
                reader.add("gpus", what, f"use {nearest_multiple(gpus, rest.gpus)}")
            data = {**data, "dp": max(1, gpus // rest.gpus)}
    try:
        layout = decode(Layout, data, f"{reader.where}layout")
    except InputError as error:
        reader.problems += error.problems
        return None
    if gpus is not None and layout.gpus != gpus and "dp" in (reader.data.get("layout") or {}):
        what = f"{gpus} is not tp × cp × pp × dp = {layout.gpus}"
        reader.add("gpus", what, f"use {layout.gpus}, or change a degree")
    return layout


def read_model(value: object, where: str = "model") -> Model:
    """Read a model given as a catalog name, a file, or a table of fields."""
    if isinstance(value, Model):
        return value
    if not isinstance(value, str):
        return decode(Model, value, where)
    path = Path(value)
    if path.is_dir() or path.name == "config.json":
        return load_config(path)
    if path.suffix in FORMATS:
        return load(Model, path)
    return catalog.get_model(value)


def read_cluster(value: object, where: str = "cluster") -> Cluster:
    """Read a cluster given as a catalog name, a file, or a table of fields."""
    if isinstance(value, Cluster):
        return value
    if isinstance(value, Mapping):
        return catalog.read_cluster(value, where)
    if not isinstance(value, str):
        fix = "use a name of mw clusters"
        raise InputError(
            [Problem(where, f"{format_value(value)} is neither a name nor a table", fix)]
        )
    if Path(value).suffix in FORMATS:
        return catalog.load_cluster(value)
    return catalog.get_cluster(value)
