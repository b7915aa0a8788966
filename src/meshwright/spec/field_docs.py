"""The fields of a spec value with the documentation written under each, read from its source."""

import ast
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec


class FieldDoc(NamedTuple):
    """One field of a spec value."""

    name: str
    kind: Any
    doc: str
    default: object
    """Its default, or `msgspec.NODEFAULT` where it must be given."""


@cache
def list_field_docs(kind: type[msgspec.Struct]) -> tuple[FieldDoc, ...]:
    """Return the fields of a struct in order, each with its documentation."""
    docs = _docs(kind)
    return tuple(
        FieldDoc(field.name, field.type, docs.get(field.name, ""), field.default)
        for field in msgspec.structs.fields(kind)
    )


def _docs(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Collect the string that stands under each field; Python itself forgets it."""
    source = sys.modules[kind.__module__].__file__
    if source is None or not Path(source).exists():
        return {}
    tree = ast.parse(Path(source).read_text(encoding="utf-8"))
    body = next(
        node.body
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and node.name == kind.__name__
    )
    docs = {}
    for statement, following in pairwise(body):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            match following:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    docs[statement.target.id] = " ".join(text.split())
    return docs
