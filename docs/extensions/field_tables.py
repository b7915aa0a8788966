"""The `fields` directive: a table of a spec value's fields, made from the value itself.

    ```{fields} meshwright.spec.model:Rotary
    ```

Names, types, defaults and meanings all come from the source, so a page cannot drift from it.
"""

import types
from collections.abc import Iterator
from importlib import import_module
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from meshwright.spec.field_docs import list_field_docs
from meshwright.spec.serialization import encode

_SCALARS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


class Row(NamedTuple):
    """One line of a table, in Markdown."""

    field: str
    type: str
    default: str
    meaning: str


def rows(kind: type[msgspec.Struct]) -> Iterator[Row]:
    """Yield one row for each field that a file may give."""
    config = kind.__struct_config__
    if config.tag_field is not None:
        yield Row(f"`{config.tag_field}`", f"`{config.tag}`", "must be given", "Says which it is.")
    for field in list_field_docs(kind):
        yield Row(
            f"`{field.name}`",
            words(field.kind, field.name),
            _default(field.default),
            field.doc,
        )


def words(kind: Any, name: str = "") -> str:
    """Say what may be written for a type."""
    inner = [part for part in get_args(kind) if part is not types.NoneType]
    origin = get_origin(kind)
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in inner)
    if origin is tuple:
        each = [words(part, name) for part in inner if part is not ...]
        return f"list, each: {each[0]}" if inner[-1] is ... else f"list of {', '.join(each)}"
    if origin is dict:
        return "table"
    if origin in (Union, types.UnionType):
        tags = [getattr(part, "__struct_config__", None) for part in inner]
        if len(inner) > 1 and all(tags):
            return "table of kind " + ", ".join(f"`{config.tag}`" for config in tags if config)
        return " or ".join(words(part, name) for part in inner)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return f"`{kind.__name__}` table"
    return _scalar(kind, name)


def _scalar(kind: Any, name: str) -> str:
    """Say what a plain value is; the end of a field's name tells its unit, as to the reader."""
    if kind in (int, float):
        if name.endswith("bytes_per_s"):
            return "rate, such as `450GB/s`"
        if name.endswith("_bytes"):
            return "size, such as `80GiB`"
        if name.endswith("_s") and not name.endswith("_per_s"):
            return "time, such as `2us`"
    return _SCALARS[kind]


def _default(value: object) -> str:
    if value is msgspec.NODEFAULT:
        return "must be given"
    if value in (None, (), "", {}):
        return "left out"
    if isinstance(value, msgspec.Struct):
        inside = ", ".join(f"{key} = {item}" for key, item in encode(value).items())
        return f"`{inside}`" if inside else "its defaults"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def table(kind: type[msgspec.Struct]) -> str:
    """Return the table of a spec value in Markdown."""
    lines = [Row("field", "type", "default", "meaning"), Row(*["---"] * 4), *rows(kind)]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |"
                     for row in lines)  # fmt: skip


class Fields(SphinxDirective):
    """Shows the fields of one spec value, named as `module:Class`."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Find the value and lay out its table."""
        module, _, name = self.arguments[0].partition(":")
        try:
            kind = getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise self.error(f"{self.arguments[0]} is no spec value: {error}") from None
        return self.parse_text_to_nodes(table(kind))


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("fields", Fields)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
