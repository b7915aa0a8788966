"""`Work`: the one description, Model × Cluster × Layout × Workload, as it stands in a file.

In a file the model and the cluster may be a catalog name, a path, or written out.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec import catalog
from meshwright.spec.cluster import Cluster
from meshwright.spec.files import FORMATS, load
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.model.huggingface import load_config
from meshwright.spec.names import nearest
from meshwright.spec.read import read, shown
from meshwright.spec.workload import Training

T = TypeVar("T")


class Work(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is to be done: this model on this cluster, laid out so, for this workload."""

    model: Model
    """The architecture."""
    cluster: Cluster
    """The hardware."""
    layout: Layout = Layout()
    """How the one lies on the other."""
    workload: Training | None = None
    """What is asked of it."""

    def check(self) -> tuple[Problem, ...]:
        """Return every violated constraint, each with a fix."""
        return self.layout.check(self.model, self.cluster, self.workload)


def read_work(data: Mapping[str, Any], where: str = "") -> Work:
    """Read a work description, listing every problem of all four parts at once.

    `gpus` beside them sizes the cluster, and fills in `layout.dp` where that is not given.
    """
    problems: list[Problem] = []

    def part(name: str, reader: Callable[[object, str], T]) -> T | None:
        try:
            return reader(data[name], f"{where}{name}")
        except InputError as error:
            problems.extend(error.problems)
            return None

    problems += [
        Problem(f"{where}{name}", "is missing", f"add {name}")
        for name in ("model", "cluster")
        if name not in data
    ]
    known = ("model", "cluster", "layout", "workload", "gpus")
    for key in data:
        if key not in known:
            close = nearest(str(key), known)
            fix = f"did you mean {close[0]}?" if close else f"use {', '.join(known)}"
            problems.append(Problem(f"{where}{key}", "is not a part of a work file", fix))
    gpus = part("gpus", lambda value, at: read(int, value, at)) if "gpus" in data else None
    model = part("model", read_model) if "model" in data else None
    cluster = part("cluster", read_cluster) if "cluster" in data else None
    layout_data = _with_dp(data.get("layout", {}), gpus, where, problems)
    workload = (
        part("workload", lambda value, at: read(Training, value, at))
        if (data.get("workload") is not None)
        else None
    )
    layout = None
    try:
        layout = read(Layout, layout_data, f"{where}layout")
    except InputError as error:
        problems.extend(error.problems)
    if cluster is not None and (gpus or layout):
        try:
            cluster = cluster.with_gpus(gpus or (layout.gpus if layout else cluster.gpus))
        except InputError as error:
            problems.extend(Problem(f"{where}gpus", p.what, p.fix) for p in error.problems)
    if problems or model is None or cluster is None or layout is None:
        raise InputError(problems)
    return Work(model=model, cluster=cluster, layout=layout, workload=workload)


def _with_dp(data: object, gpus: int | None, where: str, problems: list[Problem]) -> object:
    """Fill in the data-parallel degree that the number of GPUs leaves."""
    if gpus is None or not isinstance(data, Mapping) or "dp" in data:
        return data
    try:
        rest = read(Layout, {k: v for k, v in data.items() if k in ("tp", "cp", "pp")})
    except InputError:
        return data  # the layout's own problems are listed when it is read
    if gpus % rest.gpus:
        fix = f"use {max(1, round(gpus / rest.gpus)) * rest.gpus} GPUs"
        what = f"{gpus} is not a multiple of tp × cp × pp = {rest.gpus}"
        problems.append(Problem(f"{where}gpus", what, fix))
        return data
    return {**data, "dp": gpus // rest.gpus}


def read_model(value: object, where: str = "model") -> Model:
    """Read a model given as a catalog name, a file, or a table of fields."""
    if isinstance(value, Model):
        return value
    if not isinstance(value, str):
        return read(Model, value, where)
    path = Path(value)
    if path.is_dir() or path.name == "config.json":
        return load_config(path)
    if path.suffix in FORMATS:
        return load(Model, path)
    return catalog.model(value)


def read_cluster(value: object, where: str = "cluster") -> Cluster:
    """Read a cluster given as a catalog name, a file, or a table of fields."""
    if isinstance(value, Cluster):
        return value
    if isinstance(value, Mapping):
        return catalog.read_cluster(value, where)
    if not isinstance(value, str):
        raise InputError([Problem(where, f"{shown(value)} is neither a name nor a table")])
    if Path(value).suffix in FORMATS:
        return catalog.load_cluster(value)
    return catalog.cluster(value)
