"""Values of a program as its tests see them from another process.

Plain values are copied: numbers, texts, bytes, lists, tuples, sets, dicts, ranges, dates, and what
is derived from numbers and texts. All else stays where it is, and the other side holds a reference.
So nothing that a program defines runs where its tests run.
"""

import collections
import datetime as dt
import decimal
import fractions
import importlib
from collections.abc import Callable, ItemsView, KeysView, ValuesView
from typing import Any

_SAFE_INTEGER = 1 << 53
_SEQUENCES = {"w": list, "t": tuple, "s": set, "f": frozenset, "q": collections.deque}
_TAGS: dict[type, str] = {kind: tag for tag, kind in _SEQUENCES.items() if kind is not list}
_DICTS = (dict, collections.Counter, collections.OrderedDict, collections.defaultdict)
_NUMPY_KINDS = tuple("biufc")
_LONGEST_DTYPE = 4
_NUMBERS_AND_TEXTS = (int, float, complex, str, bytes, bytearray)


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
    if kind.__module__ == "numpy" and (parts := _encode_numpy(value)) is not None:
        return parts
    if isinstance(value, KeysView | ValuesView | ItemsView) and kind.__module__ == "builtins":
        return {
            "v" if isinstance(value, KeysView) else "w": [
                encode_value(each, refer) for each in value
            ]
        }
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


def _encode_numpy(value: Any) -> Any:
    """Return an array or a number of NumPy; None for others, such as arrays of objects."""
    if getattr(getattr(value, "dtype", None), "kind", "") not in _NUMPY_KINDS:
        return None
    if not value.shape:
        return encode_value(value.item(), lambda _: None)
    return {"u": [value.dtype.str, list(value.shape), value.tobytes().hex()]}


def _decode_numpy(kind: str, shape: list[int], data: str) -> Any:
    if len(kind) > _LONGEST_DTYPE or kind[1:2] not in _NUMPY_KINDS:
        raise ValueError
    numpy = importlib.import_module("numpy")
    return numpy.frombuffer(bytes.fromhex(data), numpy.dtype(kind)).reshape(shape).copy()


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
    if tag == "v":
        return dict.fromkeys(decode_value(each, resolve) for each in content).keys()
    if tag == "r":
        return range(*(int(decode_value(each, resolve)) for each in content))
    if tag == "u":
        return _decode_numpy(*content)
    if tag in _DECODERS:
        return _DECODERS[tag](content)
    return resolve(sent)


def _decode_date(text: str) -> dt.date:
    kind = dt.datetime if "T" in text else dt.date
    return kind.fromisoformat(text)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "n": float.fromhex,
    "i": lambda text: int(text, 16),
    "b": bytes.fromhex,
    "a": bytearray.fromhex,
    "c": lambda parts: complex(*(float.fromhex(part) for part in parts)),
    "m": decimal.Decimal,
    "o": lambda parts: fractions.Fraction(*(int(part, 16) for part in parts)),
    "e": lambda parts: dt.timedelta(*parts),
    "y": _decode_date,
}
