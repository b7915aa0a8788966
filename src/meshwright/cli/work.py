"""Work descriptions on the command line: files, environment and flags become one `Work`."""

import argparse
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from meshwright.cli.answer import Answer, Table, table
from meshwright.cli.flags import add_fields, from_environment, given, typed
from meshwright.spec.fields import fields
from meshwright.spec.files import load_data
from meshwright.spec.layout import Layout
from meshwright.spec.read import read
from meshwright.spec.resolve import Resolved, Source, resolve
from meshwright.spec.work import Work, read_work
from meshwright.spec.workload import Training

WORKLOAD_FLAGS = ("sequence_length", "tokens")
DEFAULT_LENGTH = 4096


class Asked(NamedTuple):
    """A work description with the origin of each value."""

    work: Work
    workload: Training
    """The workload, filled in where nothing was asked: one step of a short run."""
    origins: dict[str, str]


def add_work(parser: argparse.ArgumentParser) -> None:
    """Add what describes the work: files, the four parts, and every field of a layout."""
    parser.add_argument("files", nargs="*", metavar="FILE", help="work files, later ones win")
    group = parser.add_argument_group("work")
    group.add_argument("--model", help="catalog name, TOML file, or a folder with config.json")
    group.add_argument("--cluster", help="catalog name or TOML file")
    group.add_argument("--gpus", metavar="N", help="GPUs to use; sets dp where dp is not given")
    group.add_argument(
        "--dry-run", action="store_true", help="show every value and where it came from, and stop"
    )
    add_fields(parser, Layout, "layout")
    add_fields(parser, Training, "workload", WORKLOAD_FLAGS)


def asked(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Asked:
    """Resolve the work that files, environment and flags describe."""
    merged = resolve(_sources(args, environment))
    work = read_work({k: v for k, v in merged.data.items() if k != "workload"})
    workload, origins = _workload(work, merged)
    return Asked(msgspec.structs.replace(work, workload=workload), workload, origins)


def _sources(args: argparse.Namespace, environment: Mapping[str, str]) -> list[Source]:
    sources = [Source(str(path), load_data(path)) for path in args.files]
    names = ("model", "cluster", "gpus")
    variables: dict[str, Any] = {
        name: environment[f"MESHWRIGHT_{name.upper()}"]
        for name in names
        if f"MESHWRIGHT_{name.upper()}" in environment
    }
    flags: dict[str, Any] = {
        name: getattr(args, name) for name in names if getattr(args, name) is not None
    }
    for kind, part in ((Layout, "layout"), (Training, "workload")):
        from_variables = from_environment(kind, part, environment)
        from_flags = typed(kind, given(args, part))
        if from_variables:
            variables[part] = from_variables
        if from_flags:
            flags[part] = from_flags
    return [*sources, Source("environment", variables), Source("flag", flags)]


def _workload(work: Work, merged: Resolved) -> tuple[Training, dict[str, str]]:
    """Read the workload, completing it to a single step where it was left open."""
    origins = dict(merged.origins)
    data = dict(merged.data.get("workload") or {})
    layout = work.layout
    filled = {
        "sequence_length": DEFAULT_LENGTH,
        "global_batch": layout.global_batch or layout.dp * layout.microbatch * layout.pp,
    }
    for name, value in filled.items():
        if name not in data:
            data[name] = value
            origins[f"workload.{name}"] = (
                "layout" if (name == "global_batch" and layout.global_batch) else "default"
            )
    data.setdefault("tokens", 1)
    return read(Training, data, "workload"), origins


def explain(resolved: Asked) -> Answer:
    """Show every value of the work with its origin, for `--dry-run`."""
    work = resolved.work
    rows: list[tuple[str, str, str]] = [
        ("model", work.model.name, _origin(resolved, "model")),
        ("cluster", work.cluster.name, _origin(resolved, "cluster")),
        ("gpus", str(work.layout.gpus), _origin(resolved, "gpus")),
    ]
    for part, value in (("layout", work.layout), ("workload", resolved.workload)):
        for field in fields(type(value)):
            path = f"{part}.{field.name}"
            origin = _origin(resolved, path)
            if path == "layout.dp" and origin == "default" and "gpus" in resolved.origins:
                origin = f"from gpus ({_origin(resolved, 'gpus')})"
            rows.append((path, _text(getattr(value, field.name)), origin))
    data = {"values": [{"field": f, "value": v, "source": s} for f, v, s in rows]}
    return Answer("work/1", data, (_table(rows),), tuple("=".join(row[:2]) for row in rows))


def _table(rows: list[tuple[str, str, str]]) -> Table:
    return table("field, value, source", rows, wide="value, source")


def _origin(resolved: Asked, path: str) -> str:
    for known, origin in resolved.origins.items():
        if known == path or known.startswith(f"{path}."):
            return origin
    return "default"


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return "" if value is None else str(value)
