"""Turn plain data (what TOML, JSON and YAML hold) into spec values, strictly.

`decode` walks the data beside the type and collects every problem with its path before it gives
up, so a user mends a file once. It knows the types that spec values are made of (structs, tagged
unions, literals, tuples, scalars, None) and nothing of files or of what the values mean.
"""

import math
import re
import reprlib
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar, Union, cast, get_args, get_origin

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.name_suggestions import find_closest_names, format_suggestion
from meshwright.spec.units import (
    parse_bytes,
    parse_count,
    parse_number,
    parse_rate,
    parse_seconds,
)

T = TypeVar("T")
_MOST_UNKNOWN = 50
"""Unknown fields of one table that are named; finding the nearest known name takes its time."""
_MOST_FAULTY = 200
"""Problems of one list, after which its other items are left alone."""


class UnreadableValue:
    """Stands where a value could not be read; its problem is already listed.

    A rule that takes it for a value stops there, rather than judge what nobody wrote.
    """

    def _stop(self, *_: object) -> NoReturn:
        raise TypeError("a value that could not be read")

    __bool__ = __eq__ = __getattr__ = __hash__ = _stop


UNREADABLE = UnreadableValue()


def decode(kind: type[T], data: object, where: str = "") -> T:
    """Return `data` as a `kind`, or raise one `InputError` that lists all that is wrong."""
    problems: list[Problem] = []
    value = _value(kind, data, where, problems)
    if problems:
        raise InputError(problems)
    return cast(T, value)


def encode(value: msgspec.Struct) -> dict[str, Any]:
    """Return a spec value as plain data without the fields left at their defaults."""
    data = cast(dict[str, Any], msgspec.to_builtins(value))
    return cast(dict[str, Any], _prune(value, data))


def _prune(value: object, data: object) -> object:
    if isinstance(value, msgspec.Struct) and isinstance(data, dict):
        kept = {}
        config = value.__struct_config__
        if config.tag_field is not None:
            kept[config.tag_field] = data[config.tag_field]
        for field in msgspec.structs.fields(value):
            inner = getattr(value, field.name)
            if field.default is not msgspec.NODEFAULT and inner == field.default:
                continue
            kept[field.encode_name] = _prune(inner, data[field.encode_name])
        return kept
    if isinstance(value, tuple) and isinstance(data, list | tuple):
        return [_prune(inner, item) for inner, item in zip(value, data, strict=True)]
    return data


def _join(where: str, name: str) -> str:
    # A leading file name is set off by a space: "mine.toml: layout.tp".
    if not where or not name:
        return where.removesuffix(": ") or name
    return f"{where}.{name}" if not where.endswith(": ") else where + name


# Aliases let a few lines of YAML stand for more data than can be printed.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxdict = 3, 8, 8, 8


def format_value(data: object, most: int = 60) -> str:
    """Print a user's value short enough for an error line."""
    try:
        text = _SHORT.repr(data) if isinstance(data, list | tuple | Mapping) else repr(data)
    except ValueError:  # an int of more digits than Python prints
        text = "a number of thousands of digits"
    return text if len(text) <= most else text[: most - 1] + "…"


def _value(kind: Any, data: object, where: str, problems: list[Problem]) -> object:
    if kind is Any:
        return data
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _struct(kind, data, where, problems)
    origin = get_origin(kind)
    if origin is Literal:
        return _literal(get_args(kind), data, where, problems)
    if origin is tuple:
        return _tuple(get_args(kind), data, where, problems)
    if origin in (Union, types.UnionType):
        return _union(get_args(kind), data, where, problems)
    return _scalar(kind, data, where, problems)


@cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.encode_name: field for field in msgspec.structs.fields(kind)}


def _field_for(kind: type[msgspec.Struct], data: object, where: str) -> str:
    """Return the fix for a value that stands where a table belongs: a field that it may be for."""
    for name, field in _fields(kind).items():
        if type(data) in (bool, int, float, str) and field.type is type(data):
            return f"set a field of it: {_join(where, name)}={data}"
    return f"give a table of {kind.__name__}'s fields"


def _struct(
    kind: type[msgspec.Struct], data: object, where: str, problems: list[Problem]
) -> object:
    if isinstance(data, kind):
        return data
    if not isinstance(data, Mapping):
        what = f"{format_value(data)} is not a table of fields"
        problems.append(Problem(_join(where, ""), what, _field_for(kind, data, where)))
        return UNREADABLE
    before = len(problems)
    values = _fields_of(kind, data, where, problems)
    faulty = len(problems) > before
    unread = {name for name, value in values.items() if value is UNREADABLE}
    try:
        value = kind(**values)
    except InputError as error:
        problems.extend(
            Problem(_join(where, p.where), p.what, p.fix)
            for p in error.problems
            if re.split(r"[.\[]", p.where, maxsplit=1)[0] not in unread
        )
        return UNREADABLE
    except TypeError:
        # A rule asked for a field that could not be read, whose problem is listed.
        if not unread:
            raise
    return UNREADABLE if faulty else value


def _fields_of(
    kind: type[msgspec.Struct], data: Mapping[Any, Any], where: str, problems: list[Problem]
) -> dict[str, object]:
    """Read every field by itself; what is wrong or missing stands there as `UNREADABLE`."""
    fields = _fields(kind)
    config = kind.__struct_config__
    values: dict[str, object] = {}
    unknown = 0
    for key, item in data.items():
        field = fields.get(key) if isinstance(key, str) else None
        if field is not None:
            before = len(problems)
            value = _value(field.type, item, _join(where, key), problems)
            values[field.name] = value if len(problems) == before else UNREADABLE
        elif key != config.tag_field or item != config.tag:
            unknown += 1
            if unknown > _MOST_UNKNOWN:
                continue
            place = _join(where, format_value(key).strip("'"))
            what = f"{kind.__name__} has no field {format_value(key)}"
            problems.append(Problem(place, what, format_suggestion(key, fields)))
            # Its default must not stand in for the field that was meant.
            for meant in find_closest_names(key, fields, 1) if isinstance(key, str) else ():
                values.setdefault(fields[meant].name, UNREADABLE)
    if unknown > _MOST_UNKNOWN:
        what = f"has {unknown - _MOST_UNKNOWN:,} more fields that {kind.__name__} does not know"
        problems.append(Problem(_join(where, ""), what, "give a file of another kind"))
    for name, field in fields.items():
        if field.required and name not in data:
            values.setdefault(field.name, UNREADABLE)
            problems.append(
                Problem(_join(where, name), f"{kind.__name__} needs {name!r}", f"add {name}")
            )
    return values


def _literal(
    allowed: tuple[object, ...], data: object, where: str, problems: list[Problem]
) -> object:
    # `True == 1`, so the type is compared too.
    for choice in allowed:
        if type(choice) is type(data) and choice == data:
            return choice
    choices = [str(choice) for choice in allowed]
    what = f"{format_value(data)} is not one of {', '.join(choices)}"
    problems.append(Problem(where, what, format_suggestion(data, choices)))
    return UNREADABLE


def _tuple(items: tuple[Any, ...], data: object, where: str, problems: list[Problem]) -> object:
    if not isinstance(data, list | tuple):
        problems.append(
            Problem(where, f"{format_value(data)} is not a list", f"write [{format_value(data)}]")
        )
        return UNREADABLE
    if len(items) == 2 and items[1] is ...:
        kinds = [items[0]] * len(data)
    elif len(items) == len(data):
        kinds = list(items)
    else:
        problems.append(
            Problem(where, f"{format_value(data)} has {len(data)} items", f"give {len(items)}")
        )
        return UNREADABLE
    values = []
    last = len(problems) + _MOST_FAULTY
    for index, (kind, item) in enumerate(zip(kinds, data, strict=True)):
        values.append(_value(kind, item, f"{where}[{index}]", problems))
        if len(problems) > last:
            what = f"the other {len(data) - index - 1:,} items are not looked at"
            problems.append(Problem(where, what, "mend these first"))
            break
    return tuple(values)


def _union(kinds: tuple[Any, ...], data: object, where: str, problems: list[Problem]) -> object:
    if data is None and types.NoneType in kinds:
        return None
    choices = [kind for kind in kinds if kind is not types.NoneType]
    if len(choices) == 1:
        return _value(choices[0], data, where, problems)
    tagged = {
        str(kind.__struct_config__.tag): kind
        for kind in choices
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    }
    if len(tagged) == len(choices):
        return _tagged(tagged, data, where, problems)
    # Scalars and containers do not overlap in the spec types: the first that reads is the one.
    attempts: list[list[Problem]] = []
    for kind in choices:
        found: list[Problem] = []
        value = _value(kind, data, where, found)
        if not found:
            return value
        attempts.append(found)
    problems.extend(sorted(attempts, key=len)[0])
    return UNREADABLE


def _tagged(
    tagged: dict[str, type[msgspec.Struct]], data: object, where: str, problems: list[Problem]
) -> object:
    if isinstance(data, tuple(tagged.values())):
        return data
    tag_field = next(iter(tagged.values())).__struct_config__.tag_field or "kind"
    tag = data.get(tag_field) if isinstance(data, Mapping) else None
    kind = tagged.get(tag) if isinstance(tag, str) else None
    if kind is not None:
        return _struct(kind, data, where, problems)
    what = (
        f"{format_value(tag)} is not a known {tag_field}" if tag is not None else f"no {tag_field}"
    )
    problems.append(Problem(_join(where, tag_field), what, format_suggestion(tag, tagged)))
    return UNREADABLE


_EXAMPLES: dict[Any, str] = {
    bool: "use one of them",
    str: "write it in quotes",
    int: "such as 8 or 16k",
    float: "such as 0.5 or 1e-5",
}


def _scalar(kind: Any, data: object, where: str, problems: list[Problem]) -> object:
    if kind is bool or kind is str:
        if isinstance(data, kind):
            return data
    elif kind in (int, float) and not isinstance(data, bool):
        if isinstance(data, str):
            try:
                return _quantity(kind, data, where)
            except InputError as error:
                problems.extend(error.problems)
                return UNREADABLE
        if isinstance(data, int):
            return _as_number(kind, data, where, problems)
        if isinstance(data, float) and (kind is float or data.is_integer()):
            return _as_number(kind, data, where, problems)
    words = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}
    allowed = words.get(kind, getattr(kind, "__name__", str(kind)))
    fix = _EXAMPLES.get(kind, f"give {allowed}")
    problems.append(Problem(where, f"{format_value(data)} is not {allowed}", fix))
    return UNREADABLE


def _as_number(kind: Any, data: float, where: str, problems: list[Problem]) -> object:
    try:
        value = kind(data)
        finite = math.isfinite(value)
    except OverflowError:
        finite = False
    if finite:
        return value
    unit = _unit(where)
    fix = _EXAMPLES[kind] if unit is None else f'such as "{unit.example}"'
    problems.append(Problem(where, f"{format_value(data)} is not a finite number", fix))
    return UNREADABLE


class _Unit(NamedTuple):
    """How the quantity of a field is written."""

    parse: Callable[[str, str], float]
    example: str


def _unit(where: str) -> _Unit | None:
    """Return the unit of a field, known from the end of its name; None for a plain number."""
    field = re.sub(r"\[\d+\]$", "", where)
    if field.endswith("bytes_per_s"):
        return _Unit(parse_rate, "450GB/s")
    if field.endswith("_bytes"):
        return _Unit(parse_bytes, "80GB")
    if field.endswith("_s") and not field.endswith("_per_s"):
        return _Unit(parse_seconds, "2us")
    return None


def _quantity(kind: Any, text: str, where: str) -> float:
    """Read a number written with the unit of its field."""
    unit = _unit(where)
    if unit is not None:
        return cast(float, kind(unit.parse(text, where)))
    return parse_count(text, where) if kind is int else parse_number(text, where)
