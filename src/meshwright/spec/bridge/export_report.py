"""What the two directions share: an export is read back, and whatever did not survive is said.

The law of every bridge holds by construction: what reading the exported text gives differs from
what was exported only in fields that are listed. A target adds the reasons.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.bridge.framework_bridge import ImportedConfig
from meshwright.spec.bridge.spec_diff import SpecDifference, diff_layouts, diff_models
from meshwright.spec.layout.layout import Layout
from meshwright.spec.model.model import Model
from meshwright.spec.serialization import format_value

Reasons = Mapping[str, tuple[str, str]]
"""For a field, or the end of its path: why the target cannot say it, and what to do. `*` stands
for every field without an entry."""

NO_MODEL = "the settings hold no architecture: the user's model code builds it"


def fill_global_batch(layout: Layout, global_batch: int | None) -> Layout:
    """Return the layout with the workload's batch where it has none of its own."""
    if layout.global_batch is not None or global_batch is None:
        return layout
    return msgspec.structs.replace(layout, global_batch=global_batch)


def read_layout(fields: Mapping[str, Any], origin: Mapping[str, str]) -> Layout:
    """Build the layout that was read; what is wrong with a field is said of its setting."""
    try:
        return Layout(**fields)
    except InputError as error:
        raise InputError(
            problem._replace(where=origin.get(problem.where, f"layout.{problem.where}"))
            for problem in error.problems
        ) from None


def list_lost_fields(
    back: ImportedConfig,
    layout: Layout,
    model: Model | None,
    sequence_length: int | None,
    *,
    title: str,
    reasons: Reasons,
) -> tuple[Problem, ...]:
    """List every field that the exported text does not say as it was given."""
    found = [
        _problem(f"layout.{difference.path}", difference, title, reasons)
        for difference in diff_layouts(layout, back.layout)
    ]
    if model is not None and back.model is None:
        why, fix = reasons.get("model", (NO_MODEL, "build the model in code"))
        found.append(Problem("model", f"{model.name!r} cannot be said in {title}: {why}", fix))
    elif model is not None and back.model is not None:
        found += [
            _problem(f"model.{difference.path}", difference, title, reasons)
            for difference in diff_models(model, back.model)
        ]
    if sequence_length is not None and back.sequence_length != sequence_length:
        why, fix = reasons.get("sequence_length", ("they have no place for it", ""))
        what = f"{sequence_length} cannot be said in {title}: {why}"
        found.append(Problem("sequence_length", what, fix or "set it where the data are read"))
    return tuple(found)


def _problem(where: str, difference: SpecDifference, title: str, reasons: Reasons) -> Problem:
    why, fix = _reason(difference.path, reasons)
    said = f"{format_value(difference.original)} cannot be said in {title}"
    means = f"what is written means {format_value(difference.converted)}"
    # Without a better remedy, the plan can follow what will run.
    fix = fix or f"set {where} to {format_value(difference.converted)} to plan what will run"
    return Problem(where, f"{said}: {why}; {means}" if why else f"{said}; {means}", fix)


def _reason(path: str, reasons: Reasons) -> tuple[str, str]:
    """Find the reason of the longest known end of the path."""
    parts = path.split(".")
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        if end in reasons:
            return reasons[end]
    return reasons.get("*", ("", ""))


def format_comments(problems: tuple[Problem, ...], heading: str, mark: str = "#") -> list[str]:
    """Write problems as comment lines."""
    if not problems:
        return []
    lines = [f"{mark} {heading}"]
    for problem in problems:
        text = " ".join(str(problem).split())
        lines.append(f"{mark}   {text}")
    return lines


def format_header(
    layout: Layout, unexpressed: tuple[Problem, ...], assumed: tuple[Problem, ...]
) -> list[str]:
    """Write the head of an exported file: the GPUs it is for and all that needs attention."""
    degrees = f"tp {layout.tp} × cp {layout.cp} × pp {layout.pp} × dp {layout.dp}"
    return [
        f"# For {layout.gpus} GPU{'s' if layout.gpus > 1 else ''} ({degrees}); "
        "the launcher starts as many processes.",
        *format_comments(unexpressed, "Not said by these settings:"),
        *format_comments(assumed, "Assumed, because the layout does not say it:"),
    ]


def convert_tuples_to_lists(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return tables whose tuples are lists, as the file formats want them."""
    return {key: _plain_value(value) for key, value in data.items()}


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return convert_tuples_to_lists(value)
    if isinstance(value, tuple | list):
        return [_plain_value(item) for item in value]
    return value
