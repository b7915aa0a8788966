"""Values of a program as its tests see them from another process.

Plain values are copied: numbers, texts, bytes, lists, tuples, sets, dicts, ranges, dates, and what
is derived from numbers and texts. All else stays where it is, and the other side holds a reference.
So nothing that a program defines runs where its tests run.
"""

import collections
import datetime as dt
import decimal
import fractions
from collections.abc import Callable
from typing import Any, NamedTuple

_SAFE_INTEGER = 1 << 53
_SEQUENCES = {"t": tuple, "s": set, "f": frozenset, "q": collections.deque}
_TAGS: dict[type, str] = {kind: tag for tag, kind in _SEQUENCES.items()}
_DICTS = (dict, collections.Counter, collections.OrderedDict, collections.defaultdict)
_NUMBERS_AND_TEXTS = (int, float, complex, str, bytes, bytearray)


class Reference(NamedTuple):
    """Something that stays in the other process."""

    number: int
    base: str = ""
    """Of an exception's class: the built-in class that it is derived from."""
    plain: Any = None
    """Of what is derived from a list, tuple, set or dict: its content."""


def encode_value(value: Any, refer: Callable[[Any], Any]) -> Any:
    """Return a value as JSON can carry it; `refer` does so for what is not plain."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is float:
        return {"n": value.hex()}
    if kind is int:
        return value if -_SAFE_INTEGER < value < _SAFE_INTEGER else {"i": hex(value)}
    if kind is list:
        return [encode_value(each, refer) for each in value]
    if kind in _TAGS:
        return {_TAGS[kind]: [encode_value(each, refer) for each in value]}
    if kind in _DICTS:
        pairs = dict.items(value)
        return {"d": [[encode_value(k, refer), encode_value(v, refer)] for k, v in pairs]}
    if kind in (bytes, bytearray):
        return {"b" if kind is bytes else "a": value.hex()}
    if kind is range:
        return {"r": [encode_value(each, refer) for each in (value.start, value.stop, value.step)]}
    if (parts := _encode_number_or_date(value)) is not None:
        return parts
    base = next((each for each in _NUMBERS_AND_TEXTS if issubclass(kind, each)), None)
    return refer(value) if base is None else encode_value(_as_base(value, base), refer)


def _as_base(value: Any, base: Any) -> Any:
    """Return what is derived from a number or text as one, without calling what it defines."""
    if base is int:
        return int.__index__(value) + 0
    if base is float:
        return float.__float__(value) + 0.0
    if base is str:
        return str.__str__(value)[:]
    return base.__add__(value, base())


def _encode_number_or_date(value: Any) -> Any:
    kind = type(value)
    if kind is complex:
        return {"c": [value.real.hex(), value.imag.hex()]}
    if kind is decimal.Decimal:
        return {"m": str(value)}
    if kind is fractions.Fraction:
        return {"o": [hex(value.numerator), hex(value.denominator)]}
    if kind is dt.timedelta:
        return {"e": [value.days, value.seconds, value.microseconds]}
    if kind is dt.date or (kind is dt.datetime and value.tzinfo is None):
        return {"y": value.isoformat()}
    return None


def decode_value(sent: Any, resolve: Callable[[Any], Any]) -> Any:
    """Return a value that another process sent; `resolve` does so for references."""
    if isinstance(sent, list):
        return [decode_value(each, resolve) for each in sent]
    if not isinstance(sent, dict):
        return sent
    tag: str
    content: Any
    tag, content = next(iter(sent.items())) if len(sent) == 1 else ("", None)
    if tag in _SEQUENCES:
        return _SEQUENCES[tag](decode_value(each, resolve) for each in content)
    if tag == "d":
        return {decode_value(k, resolve): decode_value(v, resolve) for k, v in content}
    if tag == "n":
        return float.fromhex(content)
    if tag == "i":
        return int(content, 16)
    if tag in ("b", "a"):
        data = bytes.fromhex(content)
        return data if tag == "b" else bytearray(data)
    if tag == "c":
        return complex(float.fromhex(content[0]), float.fromhex(content[1]))
    if tag == "r":
        return range(*(int(decode_value(each, resolve)) for each in content))
    if tag in ("m", "o", "e", "y"):
        return _decode_number_or_date(tag, content)
    return resolve(sent)


def _decode_number_or_date(tag: str, content: Any) -> Any:
    if tag == "m":
        return decimal.Decimal(content)
    if tag == "o":
        return fractions.Fraction(int(content[0], 16), int(content[1], 16))
    if tag == "e":
        return dt.timedelta(*content)
    kind = dt.datetime if "T" in content else dt.date
    return kind.fromisoformat(content)
