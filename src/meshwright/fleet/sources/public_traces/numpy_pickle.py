"""Reads lists of numbers that were pickled as NumPy arrays, and calls nothing that a file names.

Acme keeps the curves of its figures so. Python's unpickler would import whatever stands in the
file; the reader of timelines refuses every pickle that names anything. Between them lies this: an
array of plain numbers is always written in the same words, `_reconstruct`, `ndarray` and `dtype`,
which are marks here and never functions. Any other name, and every opcode that is not needed, is
refused.
"""

import pickletools
from typing import Any, Final

import numpy as np

from meshwright.errors import DamagedFile, InputError, Problem

MAX_BYTES: Final = 64 << 20
_HOMES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray")
_NAMES = frozenset({"_reconstruct", "ndarray", "dtype"})
_KINDS: Final = frozenset({"f8", "f4", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1"})
_ORDERS: Final = frozenset({"<", ">", "|", "="})
_MARK = object()
_PUSHED = frozenset(
    {
        "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE",
        "SHORT_BINBYTES", "BINBYTES", "BINBYTES8", "INT", "FLOAT",
    }
)  # fmt: skip
_IGNORED = frozenset({"PROTO", "FRAME"})
_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Name:
    """A name of NumPy that stands in the file."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Array:
    """An array or a dtype that is being described."""

    def __init__(self, what: str, kind: str = "") -> None:
        self.what, self.kind = what, kind
        self.value: np.ndarray[Any, Any] | None = None


class _Refused(Exception):
    pass


def read_arrays(raw: bytes, where: str) -> list[Any]:
    """Return the list of arrays and plain values that a pickle describes."""
    fix = "unsafe pickle: it can execute code. Do not load it with pickle or torch"
    if len(raw) > MAX_BYTES:
        raise InputError([Problem(where, f"has more than {MAX_BYTES >> 20} MiB", fix)])
    try:
        found = _Machine().run(raw)
    except _Refused as error:
        raise InputError([Problem(where, f"refused: {error}", fix)]) from None
    except (ValueError, IndexError, TypeError, AttributeError) as error:
        what = f"truncated pickle, or not one of arrays: {error}"
        raise DamagedFile([Problem(where, what, "copy it again")]) from None
    if not isinstance(found, list | tuple):
        raise InputError([Problem(where, "holds no list of arrays", fix)])
    return [item.value if isinstance(item, _Array) else item for item in found]


class _Machine:
    """The stack and the memo of a pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: list[Any] = []

    def run(self, raw: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(raw):
            if opcode.name == "STOP":
                return self.stack.pop()
            self._do(opcode.name, argument)
        raise ValueError("it breaks off")

    def _do(self, name: str, argument: Any) -> None:  # noqa: C901, PLR0912 - one opcode each
        stack = self.stack
        if name in _IGNORED:
            return
        if name in _PUSHED:
            stack.append(argument)
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            if name != "MEMOIZE" and argument != len(self.memo):
                raise _Refused("the memo does not count up")
            self.memo.append(stack[-1])
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name in ("NONE", "NEWTRUE", "NEWFALSE"):
            stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "EMPTY_TUPLE":
            stack.append(())
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "APPEND":
            item = stack.pop()
            self._list().append(item)
        elif name == "APPENDS":
            items = self._to_mark()
            self._list().extend(items)
        elif name == "TUPLE":
            stack.append(tuple(self._to_mark()))
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("STACK_GLOBAL", "GLOBAL"):
            self._name(name, argument)
        elif name == "REDUCE":
            self._described()
        elif name == "BUILD":
            self._filled()
        else:
            raise _Refused(f"opcode {name} builds what no list of arrays holds")

    def _list(self) -> list[Any]:
        if not isinstance(self.stack[-1], list):
            raise TypeError("a value is appended to what is no list")
        return self.stack[-1]

    def _to_mark(self) -> list[Any]:
        place = len(self.stack) - 1 - self.stack[::-1].index(_MARK)
        items = self.stack[place + 1 :]
        del self.stack[place:]
        return items

    def _name(self, opcode: str, argument: Any) -> None:
        if opcode == "GLOBAL":
            home, name = str(argument).split(" ", 1)
        else:
            name, home = self.stack.pop(), self.stack.pop()
        if home not in _HOMES or name not in _NAMES:
            raise _Refused(f"it asks for {home}.{name}")
        self.stack.append(_Name(name))

    def _described(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, _Name) or not isinstance(arguments, tuple):
            raise _Refused("it calls what is no part of an array")
        if name.name == "_reconstruct":
            self.stack.append(_Array("array"))
        elif name.name == "dtype" and arguments[0] in _KINDS:
            self.stack.append(_Array("dtype", arguments[0]))
        else:
            raise _Refused(f"it holds an array of {arguments[0]!r}, not of plain numbers")

    def _filled(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, _Array) or not isinstance(state, tuple):
            raise _Refused("it changes what is no array")
        if target.what == "dtype":
            if state[1] not in _ORDERS or any(part is not None for part in state[2:5]):
                raise _Refused("it holds an array of records")
            target.kind = state[1] + target.kind if state[1] != "|" else target.kind
            return
        _, shape, kind, fortran, data = state
        if not isinstance(kind, _Array) or not isinstance(data, bytes):
            raise _Refused("it holds an array of objects")
        values = np.frombuffer(data, dtype=np.dtype(kind.kind))
        target.value = values.reshape(shape, order="F" if fortran else "C")
