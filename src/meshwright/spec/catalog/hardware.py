"""The catalog of real GPUs and clusters: names to values, read from TOML when first asked for.

It knows where the catalog lies and what names people use. The figures are in `list_gpus.toml` and
`list_clusters.toml`, each with its source.
"""

import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from meshwright.errors import InputError, Problem
from meshwright.spec.cluster import Cluster, Gpu
from meshwright.spec.file_formats import load_data
from meshwright.spec.name_suggestions import build_unknown_name_problem
from meshwright.spec.serialization import decode


class _Named(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def aliases(self) -> tuple[str, ...]: ...


N = TypeVar("N", bound=_Named)


@cache
def list_gpus() -> Mapping[str, Gpu]:
    """Return every GPU of the catalog by name."""
    return MappingProxyType(
        {name: decode(Gpu, {"name": name, **data}, name) for name, data in _table("gpus").items()}
    )


@cache
def list_clusters() -> Mapping[str, Cluster]:
    """Return every cluster of the catalog by name."""
    return MappingProxyType(
        {
            name: read_cluster({"name": name, **data}, name)
            for name, data in _table("clusters").items()
        }
    )


def get_gpu(name: str) -> Gpu:
    """Return the GPU of that name or alias, whatever its case."""
    return _find("GPU", name, list_gpus(), "gpu")


def get_cluster(name: str) -> Cluster:
    """Return the cluster of that name or alias, whatever its case."""
    return _find("cluster", name, list_clusters(), "cluster")


def read_cluster(data: object, where: str = "") -> Cluster:
    """Read a cluster from plain data whose `get_gpu` is a catalog name or a table of its own."""
    if isinstance(data, dict) and isinstance(data.get("gpu"), str):
        try:
            device: object = get_gpu(data["gpu"])
        except InputError as error:
            place = f"{where}gpu" if not where or where.endswith(": ") else f"{where}.gpu"
            # The rest of the file is read all the same, so that every problem is listed.
            problems = [Problem(place, p.what, p.fix) for p in error.problems]
            stand_in = {**data, "gpu": next(iter(list_gpus().values()))}
            try:
                decode(Cluster, stand_in, where)
            except InputError as rest:
                problems.extend(rest.problems)
            raise InputError(problems) from None
        data = {**data, "gpu": device}
    return decode(Cluster, data, where)


def load_cluster(path: str | Path) -> Cluster:
    """Read a cluster from a TOML, JSON or YAML file."""
    return read_cluster(load_data(path), f"{Path(path)}: ")


def _table(name: str) -> dict[str, Any]:
    text = files("meshwright.spec.catalog").joinpath(f"{name}.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _find(kind: str, name: str, known: Mapping[str, N], where: str) -> N:
    wanted = normalize_name(name)
    found = known.get(wanted) or _aliases(known.values()).get(wanted)
    if found is None:
        raise InputError([build_unknown_name_problem(kind, name, known, where)])
    return found


def _aliases(values: Iterable[N]) -> dict[str, N]:
    return {normalize_name(alias): value for value in values for alias in value.aliases}


def normalize_name(name: str) -> str:
    """Return a name as the catalog writes it: lower case, dashes, no remark in brackets."""
    without_remark = re.sub(r"\([^()]*\)", " ", name)
    return re.sub(r"[\s_/]+", "-", without_remark.strip().lower())
