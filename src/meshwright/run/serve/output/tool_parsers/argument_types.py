"""What kinds of values an argument may have, and its JSON where it was written as plain text."""

import json
from collections.abc import Mapping
from typing import Any

STRING_TYPE = frozenset({"string"})
_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Python's words, which templates that write values by `string` teach models."""


def get_schema_types(schema: Any, whole: Any = None) -> frozenset[str]:
    """Return the kinds of values that a schema allows; none where it does not say.

    References are followed within the `whole` schema that it is a part of.
    """
    return _kinds(schema, schema if whole is None else whole, 0)


def _kinds(schema: Any, whole: Any, depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > 8:
        return frozenset()
    if isinstance(name := schema.get("$ref"), str):
        return _kinds(_followed(name, whole), whole, depth + 1)
    told = schema.get("type")
    if isinstance(told, str):
        return frozenset({told})
    if isinstance(told, list):
        return frozenset(map(str, told))
    for word in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(word), list):
            found = [_kinds(part, whole, depth + 1) for part in parts]
            return frozenset().union(*found) if all(found) else frozenset()
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None),
                  list):  # fmt: skip
        return frozenset(map(_kind, values))
    return frozenset()


def _followed(name: str, whole: Any) -> Any:
    found = whole
    for step in name.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def coerce_argument(text: str, kinds: frozenset[str]) -> str:
    """Return the JSON of an argument that was written as plain text.

    What no kind allows is passed on as a text: the mistake is the model's.
    """
    if kinds == STRING_TYPE:
        return json.dumps(text, ensure_ascii=False)
    bare = text.strip()
    bare = _WORDS.get(bare, bare)
    try:
        kind = _kind(json.loads(bare, parse_constant=_no_number))
    except (ValueError, RecursionError):
        kind = "string"
    # A text in quotes is JSON too, but these quotes may be a part of it.
    whole = kind == "integer" and "number" in kinds
    if kind != "string" and (not kinds or kind in kinds or whole):
        return bare
    return json.dumps(text, ensure_ascii=False)


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _kind(value: object) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case None:
            return "null"
        case list():
            return "array"
        case dict():
            return "object"
    return "string"
