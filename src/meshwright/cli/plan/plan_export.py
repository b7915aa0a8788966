"""A plan as words to paste: the `mw simulate` line that predicts it, and a framework's settings."""

import argparse
import re
import shlex
from typing import Any

from meshwright.cli.flags.problems import format_flag
from meshwright.cli.flags.spec_fields import flag_name, list_fields
from meshwright.cli.flags.work import WORKLOAD_FLAGS
from meshwright.cli.plan.flags import PlanRequest, is_catalog_cluster
from meshwright.predict.plan import Plan
from meshwright.spec import catalog
from meshwright.spec.bridge import ExportedConfig
from meshwright.spec.layout import Layout
from meshwright.spec.model import Model
from meshwright.spec.units import format_count, parse_count
from meshwright.spec.workload import TrainingWorkload

WIDTH = 78
_SHELL_WORD = re.compile(r"(?:'[^']*'|\"[^\"]*\"|[^\s'\"])+")
"""A word of a shell's line, with the spaces that are quoted in it."""


def format_simulate_command(request: PlanRequest, plan: Plan, args: argparse.Namespace) -> str:
    """Return the `mw simulate` line of a plan.

    Names of the catalog stand for themselves. What is in no catalog is taken from the user's files,
    and then every field in which the file's layout differs is named.
    """
    question, own = request.question, request.work.work
    listed = is_catalog_cluster(own.cluster)
    cluster = own.cluster.name if listed else args.cluster
    plain = _is_named(question.model) and cluster and question.workload.lengths is None
    parts = ["mw simulate"]
    if plain:
        parts.append(question.model.name)
    else:
        parts += [shlex.quote(word) for word in args.files]
        parts += [f"--model {shlex.quote(args.model)}"] if args.model is not None else []
        cluster = args.cluster
    parts += [f"--cluster {shlex.quote(cluster)}"] if cluster else []
    parts.append(f"--gpus {plan.layout.gpus}")
    parts += [f"--calibration {shlex.quote(args.calibration)}"] if args.calibration else []
    parts += ["--no-calibration"] if args.no_calibration else []
    parts += [f"--framework {args.framework}"] if args.framework != "megatron" else []
    beside = Layout() if plain else own.layout
    parts += [*_layout_flags(plan.layout, beside), *_workload_flags(request)]
    gone = [name for name in _changed(plan.layout, beside) if not _is_set(plan.layout, name)]
    parts += [f"# and without {', '.join(gone)} in the file"] if gone else []
    return " ".join(parts)


def _is_named(model: Model) -> bool:
    known = catalog.list_models().get(model.name)
    return known is not None and known.model == model


def _changed(layout: Layout, beside: Layout) -> list[str]:
    """Return the fields that differ; dp follows from the GPUs, the batch from the workload."""
    names = (name for name in Layout.__struct_fields__ if name not in ("dp", "global_batch"))
    return [name for name in names if getattr(layout, name) != getattr(beside, name)]


def _is_set(layout: Layout, name: str) -> bool:
    return getattr(layout, name) not in (None, ())


def _layout_flags(layout: Layout, beside: Layout) -> list[str]:
    """Return the flags that turn one layout into another."""
    changed = [name for name in _changed(layout, beside) if _is_set(layout, name)]
    return [format_flag(name, getattr(layout, name)) for name in changed]


def _workload_flags(request: PlanRequest) -> list[str]:
    workload = request.question.workload
    found = [f"--global-batch {workload.global_batch}"]
    for field in list_fields(TrainingWorkload):
        name = field.name.partition(".")[0]
        if name not in WORKLOAD_FLAGS or (name == "tokens" and not request.has_tokens):
            continue
        value = _at(workload, field.name)
        if value not in (None, (), field.default):
            text = ",".join(value) if isinstance(value, tuple) else _number(value)
            found.append(f"{flag_name(field.name)} {shlex.quote(text)}")
    return found


def _at(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value


def _number(value: Any) -> str:
    """Write a count with its suffix where that loses nothing."""
    if type(value) is int and value >= 10**9 and parse_count(format_count(value)) == value:
        return format_count(value)
    return str(value)


def wrap_command(line: str) -> str:
    """Break a command between its flags, so that it fits a screen and can still be pasted."""
    flags: list[str] = []
    for word in _SHELL_WORD.findall(line):
        if word.startswith("--") or not flags:
            flags.append(word)
        else:
            flags[-1] += f" {word}"
    rows = flags[:1]
    for flag in flags[1:]:
        if len(rows[-1]) + len(flag) + 3 > WIDTH:
            rows.append(f"  {flag}")
        else:
            rows[-1] += f" {flag}"
    return " \\\n".join(rows)


def export_framework_config(request: PlanRequest, plan: Plan) -> ExportedConfig | None:
    """Return the settings of the framework that was asked for."""
    if request.target is None:
        return None
    workload = request.question.workload
    return request.target.export_config(
        plan.layout,
        request.question.model,
        sequence_length=workload.sequence_length,
        global_batch=workload.global_batch,
    )
