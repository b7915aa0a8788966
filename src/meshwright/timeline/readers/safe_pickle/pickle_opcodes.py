"""The opcodes of pickles that push a scalar, build a plain container, or use the memo.

`safe_pickle` drives them. No opcode that imports or calls anything has a handler here.
"""

import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

MAX_INTEGER_BYTES = 64
_MAX_NUMBER_CHARACTERS = 80
_KEY_LIMIT = 1 << 10
"""An integer that is a key lies below this. A writer chooses the hash of an integer, so that each
key of a dict of many could be made to probe the places of all others."""


class InvalidPickle(Exception):
    """The bytes make no sense."""


class ForbiddenOpcode(Exception):
    """The bytes ask for what is never given."""


class PickleMachine(NamedTuple):
    """What an opcode may touch."""

    raw: bytes
    stack: list[Any]
    marks: list[int]
    """Where in the stack each open mark stands."""
    memo: list[Any]


def read_argument(raw: bytes, at: int, size: int) -> bytes:
    """Return the bytes of an argument; a length beyond the file's end is a broken file."""
    if size > len(raw) - at:
        raise InvalidPickle(
            f"{size:,} bytes are promised at byte {at:,} and {len(raw) - at:,} are left"
        )
    return raw[at : at + size]


def store_memo(memo: list[Any], where: int, value: Any) -> None:
    """Keep a value under a number. Writers count up by one; an old one began with 1."""
    if where < len(memo):
        memo[where] = value
    elif where <= len(memo) + 1:
        memo += [value] * (where + 1 - len(memo))
    else:
        raise InvalidPickle(f"the memo goes on with {where:,} after {len(memo):,} entries")


def peek_stack(state: PickleMachine) -> Any:
    """Return the last value, which must stand above the last mark."""
    if len(state.stack) <= (state.marks[-1] if state.marks else 0):
        raise InvalidPickle("a value is missing")
    return state.stack[-1]


def _pop(state: PickleMachine) -> Any:
    value = peek_stack(state)
    del state.stack[-1]
    return value


def _since_mark(state: PickleMachine) -> list[Any]:
    if not state.marks:
        raise InvalidPickle("there is no mark")
    at = state.marks.pop()
    found = state.stack[at:]
    del state.stack[at:]
    return found


# Containers.


def set_dict_items(target: Any, items: list[Any]) -> None:
    """Put keys and values, one after the other, into a dict; keys of other kinds are refused."""
    if type(target) is not dict or len(items) % 2:
        raise InvalidPickle("pairs are set into what is no dict")
    keys = items[::2]
    if set(map(type, keys)) != _WORDS:
        for key in keys:
            _check_key(key)
    target.update(zip(keys, items[1::2], strict=True))


_WORDS = {str}


def _check_key(key: Any) -> None:
    """Refuse a key of a kind, or of a size, that no dump has."""
    if not (
        type(key) in (str, bytes, bool)
        or key is None
        or (type(key) is int and -_KEY_LIMIT < key < _KEY_LIMIT)
    ):
        kind = "large integer" if type(key) is int else type(key).__name__
        raise ForbiddenOpcode(
            f"a {kind} is a key: only words and integers below {_KEY_LIMIT:,} may be"
        )


def _dict(state: PickleMachine) -> None:
    built: dict[Any, Any] = {}
    set_dict_items(built, _since_mark(state))
    state.stack.append(built)


def _tuple_of(count: int) -> Callable[[PickleMachine], None]:
    def build(state: PickleMachine) -> None:
        found = [_pop(state) for _ in range(count)]
        state.stack.append(tuple(reversed(found)))

    return build


CONTAINERS: dict[int, Callable[[PickleMachine], None]] = {
    ord("]"): lambda state: state.stack.append([]),
    ord("}"): lambda state: state.stack.append({}),
    ord(")"): lambda state: state.stack.append(()),
    ord("l"): lambda state: state.stack.append(_since_mark(state)),
    ord("t"): lambda state: state.stack.append(tuple(_since_mark(state))),
    ord("d"): _dict,
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
}


# Everything else. Each takes the state and where its argument begins, and returns where it ends.


def _append(state: PickleMachine, at: int) -> int:
    value = _pop(state)
    _extend(peek_stack(state), [value])
    return at


def _appends(state: PickleMachine, at: int) -> int:
    found = _since_mark(state)
    _extend(peek_stack(state), found)
    return at


def _extend(target: Any, values: list[Any]) -> None:
    if type(target) is not list:
        raise InvalidPickle("values are appended to what is no list")
    target.extend(values)


def _setitem(state: PickleMachine, at: int) -> int:
    value = _pop(state)
    key = _pop(state)
    set_dict_items(peek_stack(state), [key, value])
    return at


def _setitems(state: PickleMachine, at: int) -> int:
    found = _since_mark(state)
    set_dict_items(peek_stack(state), found)
    return at


def _pushes(value: object) -> "Callable[[PickleMachine, int], int]":
    def push(state: PickleMachine, at: int) -> int:
        state.stack.append(value)
        return at

    return push


def _sized(width: int, make: Callable[[bytes], Any]) -> "Callable[[PickleMachine, int], int]":
    """Make the handler of an opcode whose argument carries its own length."""

    def handle(state: PickleMachine, at: int) -> int:
        size = int.from_bytes(read_argument(state.raw, at, width), "little")
        state.stack.append(make(read_argument(state.raw, at + width, size)))
        return at + width + size

    return handle


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _integer(data: bytes) -> int:
    if len(data) > MAX_INTEGER_BYTES:
        raise ForbiddenOpcode(f"an integer of {len(data):,} bytes")
    return int.from_bytes(data, "little", signed=True)


def _float(state: PickleMachine, at: int) -> int:
    state.stack.append(struct.unpack(">d", read_argument(state.raw, at, 8))[0])
    return at + 8


def _skips(size: int) -> "Callable[[PickleMachine, int], int]":
    def skip(state: PickleMachine, at: int) -> int:
        read_argument(state.raw, at, size)
        return at + size

    return skip


def _line(make: Callable[[bytes], Any]) -> "Callable[[PickleMachine, int], int]":
    """Make the handler of an opcode of protocol 0, whose argument ends with its line."""

    def handle(state: PickleMachine, at: int) -> int:
        end = state.raw.find(b"\n", at)
        if end < 0:
            raise InvalidPickle(f"the line at byte {at:,} has no end")
        state.stack.append(make(state.raw[at:end]))
        return end + 1

    return handle


def _number(make: Callable[[str], Any]) -> Callable[[bytes], Any]:
    def read(data: bytes) -> Any:
        if len(data) > _MAX_NUMBER_CHARACTERS:
            raise ForbiddenOpcode(f"a number of {len(data):,} characters")
        try:
            return make(data.decode("ascii").strip())
        except ValueError:
            raise InvalidPickle(f"{data[:20]!r} is no number") from None

    return read


def _int_or_bool(text: str) -> int | bool:
    return text == "01" if text in ("00", "01") else int(text)


def _quoted(data: bytes) -> str:
    data = data.strip()
    if len(data) < 2 or data[:1] != data[-1:] or data[:1] not in (b"'", b'"'):
        raise InvalidPickle("a quoted word has no quotes")
    return _ESCAPE.sub(_unescaped, data[1:-1]).decode("utf-8", "replace")


_ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def _unescaped(found: re.Match[bytes]) -> bytes:
    if found[1]:
        return bytes.fromhex(found[1].decode())
    return _ESCAPES.get(found[2], found[2])


def _raw_unicode(data: bytes) -> str:
    try:
        return data.decode("raw_unicode_escape")
    except ValueError:
        raise InvalidPickle("a word is badly escaped") from None


def _put(width: int) -> "Callable[[PickleMachine, int], int]":
    def put(state: PickleMachine, at: int) -> int:
        store_memo(
            state.memo,
            int.from_bytes(read_argument(state.raw, at, width), "little"),
            peek_stack(state),
        )
        return at + width

    return put


def _put_line(state: PickleMachine, at: int) -> int:
    at = _line(_number(int))(state, at)
    where = state.stack.pop()
    if where < 0:
        raise InvalidPickle("a memo's number is out of range")
    store_memo(state.memo, where, peek_stack(state))
    return at


def _get_line(state: PickleMachine, at: int) -> int:
    at = _line(_number(int))(state, at)
    where = state.stack.pop()
    if where < 0:
        raise InvalidPickle("a memo's number is out of range")
    state.stack.append(state.memo[where])
    return at


def _drop(state: PickleMachine, at: int) -> int:
    if state.marks and state.marks[-1] == len(state.stack):
        state.marks.pop()
    else:
        _pop(state)
    return at


def _drop_to_mark(state: PickleMachine, at: int) -> int:
    _since_mark(state)
    return at


def _again(state: PickleMachine, at: int) -> int:
    state.stack.append(peek_stack(state))
    return at


HANDLERS: dict[int, Callable[[PickleMachine, int], int]] = {
    0x80: _skips(1), 0x95: _skips(8),
    ord("N"): _pushes(None), 0x88: _pushes(True), 0x89: _pushes(False),
    ord("e"): _appends, ord("a"): _append, ord("u"): _setitems, ord("s"): _setitem,
    0x8C: _sized(1, _text), ord("X"): _sized(4, _text), 0x8D: _sized(8, _text),
    ord("U"): _sized(1, _text), ord("T"): _sized(4, _text),
    ord("C"): _sized(1, bytes), ord("B"): _sized(4, bytes), 0x8E: _sized(8, bytes),
    0x96: _sized(8, bytes),
    0x8A: _sized(1, _integer), 0x8B: _sized(4, _integer),
    ord("G"): _float,
    ord("F"): _line(_number(float)), ord("I"): _line(_number(_int_or_bool)),
    ord("L"): _line(_number(lambda text: int(text.removesuffix("L")))),
    ord("S"): _line(_quoted), ord("V"): _line(_raw_unicode),
    ord("q"): _put(1), ord("r"): _put(4), ord("p"): _put_line, ord("g"): _get_line,
    ord("0"): _drop, ord("1"): _drop_to_mark, ord("2"): _again,
}  # fmt: skip
