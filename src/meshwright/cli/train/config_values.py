"""Every value of a job or a loop with where it comes from, for `mw train --dry-run`."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from meshwright.cli.result import TableView, make_table
from meshwright.spec.config_sources import get_source_name
from meshwright.spec.field_docs import list_field_docs


class ConfigValues(NamedTuple):
    """Values for programs, for people, and for who wants little."""

    data: dict[str, Any]
    table: TableView
    quiet_lines: tuple[str, ...]


def list_config_values(job: msgspec.Struct, origins: Mapping[str, str]) -> ConfigValues:
    """Tell all values, field by field."""
    rows = [(path, value, get_source_name(path, origins)) for path, value in _values(job)]
    shown = [(field, _text(value), source) for field, value, source in rows]
    return ConfigValues(
        {"values": [{"field": f, "value": v, "source": s} for f, v, s in rows]},
        make_table("field, value, source", shown, wide="value, source"),
        tuple(f"{field}={value}" for field, value, _ in shown),
    )


def _values(job: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    """Go through the values of a job; a model that it describes is told by its name."""
    for field in list_field_docs(type(job)):
        value = getattr(job, field.name)
        if field.name == "model":
            yield field.name, getattr(value, "name", value)
        elif isinstance(value, msgspec.Struct):
            if field.name == "recipe":
                yield "recipe.kind", value.__struct_config__.tag
            for inner in list_field_docs(type(value)):
                yield f"{field.name}.{inner.name}", msgspec.to_builtins(getattr(value, inner.name))
        else:
            yield field.name, value


def _text(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{name}={_text(inner)}" for name, inner in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(_text(one) for one in value)
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)
