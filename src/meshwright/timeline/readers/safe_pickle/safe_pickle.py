"""Reads pickles of strangers: builds plain containers and scalars, runs nothing, stays in bounds.

Python's own unpickler calls whatever a file names. This one is an interpreter of its own that knows
only the opcodes which push a scalar, build a list, a tuple or a dict, or fetch from the memo. Every
other opcode (GLOBAL, REDUCE, BUILD, INST, OBJ, NEWOBJ, EXT, PERSID, buffers, sets) is refused by
name: there is no path from a file's bytes to an import or a call. A large file in which
`pickle_rewrite` finds plain opcodes alone is read by Python's unpickler, for speed, for as long as
a sound file of its size would take; its pairs come back as lists.

Bounds, each linear in the file: a declared length must lie within the bytes left; integers have at
most 64 bytes; containers are at most one per 16 bytes; the memo counts up as writers count, so that
each entry takes a place in a list; open marks are few; keys are words and integers below 1,024, so
that no key's hash costs more than its bytes and no dict can be made to probe all its places for
each key; and a compressed file may grow by a bounded factor. What is built takes some 35 bytes for
each byte of a file made for the purpose. Lists shared through the memo stay shared: readers that
unfold them count what they unfold. Opcodes: CPython's Lib/pickletools.py.
"""

import gc
import io
import pickle
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.timeline.readers.parsing.compressed_file import (
    DECOMPRESS_REMEDY,
    TextChunks,
    detect_compression,
)
from meshwright.timeline.readers.safe_pickle.pickle_opcodes import (
    CONTAINERS,
    HANDLERS,
    MAX_INTEGER_BYTES,
    ForbiddenOpcode,
    InvalidPickle,
    PickleMachine,
    read_argument,
    set_dict_items,
    store_memo,
)
from meshwright.timeline.readers.safe_pickle.pickle_rewrite import rewrite_pickle

MAX_BYTES = 4 << 30
"""Most bytes of one file, after decompression."""
_CHUNK_BYTES = 1 << 20
_FREE_BYTES = 8 << 20
_MAX_RATIO = 150
"""Past the first 8 MiB a compressed file may not grow by more: real snapshots reach 10 to 40."""
_BYTES_PER_CONTAINER = 16
"""Real dumps have one for each 24 bytes, real snapshots one for each 97."""
_FREE_CONTAINERS = 4096
_LARGE_BYTES = 1 << 15
"""Below this the interpreter takes a few milliseconds."""
_PIECE_BYTES = 1024
_FREE_S, _S_PER_BYTE = 0.5, 0.25e-6
"""Of CPU time: a sound file takes a tenth of that for each byte."""
_MOST_MARKS = 4096
"""One is open for each level of nesting; Python's own pickler goes no deeper than some hundred."""
_DANGEROUS = {
    "c": "GLOBAL", "\x93": "STACK_GLOBAL", "R": "REDUCE", "b": "BUILD", "i": "INST", "o": "OBJ",
    "\x81": "NEWOBJ", "\x92": "NEWOBJ_EX", "\x82": "EXT1", "\x83": "EXT2", "\x84": "EXT4",
    "P": "PERSID", "Q": "BINPERSID",
}  # fmt: skip
_UNKNOWN = {
    "\x8f": "EMPTY_SET", "\x90": "ADDITEMS", "\x91": "FROZENSET", "\x97": "NEXT_BUFFER",
    "\x98": "READONLY_BUFFER",
}  # fmt: skip


def load_safe_pickle(path: str | Path) -> Any:
    """Read one pickle file, plain or compressed by gzip."""
    path = Path(path)
    return parse_pickle(read_bounded_file(path), str(path))


def read_bounded_file(path: Path) -> bytes:
    """Read a file's bytes, decompressed where it is a gzip file, within bounds."""
    source = TextChunks(
        path, _CHUNK_BYTES, always_allowed_bytes=_FREE_BYTES, max_compression_ratio=_MAX_RATIO
    )
    chunks: list[bytes] = []
    for chunk in source:
        chunks.append(chunk)
        if len(chunks) * _CHUNK_BYTES > MAX_BYTES:
            what, fix = f"has more than {MAX_BYTES >> 30} GiB", "record a shorter history"
            raise InputError([Problem(str(path), what, fix)])
    whole = b"".join(chunks)
    packing = detect_compression(whole)
    if packing:
        raise InputError([Problem(str(path), f"is packed ({packing})", DECOMPRESS_REMEDY)])
    if source.error:
        fix = "unpack it and look what it is, or copy it again from where it was written"
        raise DamagedFile([Problem(str(path), source.error, fix)])
    return whole


@contextmanager
def pause_gc() -> Iterator[None]:
    """Make many containers without looking for cycles among them: a quarter of the time else."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def parse_pickle(raw: bytes, where: str = "pickle") -> Any:
    """Build the plain value that a pickle's bytes describe; refuse any that need more."""
    try:
        with pause_gc():
            found = _read_by_python(raw) if len(raw) >= _LARGE_BYTES else None
            return _interpret(raw) if found is None else found
    except ForbiddenOpcode as error:
        fix = "unsafe pickle: it can execute code. Do not load it with pickle or torch"
        raise InputError([Problem(where, f"refused: {error}", fix)]) from None
    except (InvalidPickle, IndexError, struct.error) as error:
        what = (
            str(error) if isinstance(error, InvalidPickle) else "an opcode lacks what it works on"
        )
        raise DamagedFile([Problem(where, f"truncated pickle: {what}", _AGAIN)]) from None


class _NoClassUnpickler(pickle.Unpickler):
    """Python's unpickler; `rewrite_pickle` passes no class to it, and it returns none."""

    def find_class(self, module: str, name: str, /) -> Any:
        raise ForbiddenOpcode(f"it asks for {module}.{name}")


def _read_by_python(raw: bytes) -> Any:
    """Read a large file in a quarter of the time, where every opcode is a plain one; else None."""
    plain = rewrite_pickle(raw, len(raw) // _BYTES_PER_CONTAINER + _FREE_CONTAINERS)
    if plain is None:
        return None
    try:
        # It reads ahead where it may peek, in half the time.
        return _NoClassUnpickler(io.BufferedReader(_TimedBytes(plain), _PIECE_BYTES)).load()
    except _FAULTS:  # Which fault it was, the interpreter finds and says.
        return None


class _TooSlow(Exception):
    """Python's unpickler takes longer than any sound file of this size."""


class _TimedBytes(io.RawIOBase):
    """Bytes that are given only for as long as a sound file of their size takes."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self._bytes = io.BytesIO(data)
        self._deadline_s = time.thread_time() + _FREE_S + _S_PER_BYTE * len(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if time.thread_time() > self._deadline_s:
            raise _TooSlow
        return self._bytes.readinto(buffer)


_FAULTS = (
    _TooSlow,
    pickle.UnpicklingError,
    EOFError,
    TypeError,
    ValueError,
    AttributeError,
    LookupError,
    ForbiddenOpcode,
    OverflowError,
    MemoryError,
)


_AGAIN = "copy it again from where it was written, or leave it out"


def _interpret(raw: bytes) -> Any:  # noqa: C901, PLR0912, PLR0915 - the opcodes in one loop, for speed
    """Run the opcodes. The most frequent stand first, and in the loop itself."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []
    state = PickleMachine(raw, stack, marks, memo)
    push, pop, length, at = stack.append, stack.pop, len(raw), 0
    containers_left = length // _BYTES_PER_CONTAINER + _FREE_CONTAINERS
    int_from = int.from_bytes
    while at < length:
        # An argument that the end cuts short leaves `at` behind it: the loop ends, and says so.
        code = raw[at]
        at += 1
        if code == 0x68:  # BINGET
            push(memo[raw[at]])
            at += 1
        elif code == 0x28:  # MARK
            marks.append(len(stack))
            if len(marks) > _MOST_MARKS:
                raise ForbiddenOpcode(
                    f"more than {_MOST_MARKS:,} containers are begun and not ended"
                )
        elif code == 0x4B:  # BININT1
            push(raw[at])
            at += 1
        elif code == 0x65:  # APPENDS
            start = marks.pop()
            if start <= (marks[-1] if marks else 0) or type(stack[start - 1]) is not list:
                raise InvalidPickle("values are appended to what is no list")
            stack[start - 1] += stack[start:]
            del stack[start:]
        elif code == 0x4D:  # BININT2
            push(int_from(raw[at : at + 2], "little"))
            at += 2
        elif code in CONTAINERS:
            containers_left -= 1
            if not containers_left:
                raise ForbiddenOpcode("it builds more containers than its size can mean")
            if code == 0x5D:  # EMPTY_LIST
                push([])
            elif code == 0x7D:  # EMPTY_DICT
                push({})
            else:
                CONTAINERS[code](state)
        elif code == 0x71:  # BINPUT
            store_memo(memo, raw[at], stack[-1])
            at += 1
        elif code == 0x72:  # LONG_BINPUT
            where = int_from(raw[at : at + 4], "little")
            if where == len(memo):
                memo.append(stack[-1])
            else:
                store_memo(memo, where, stack[-1])
            at += 4
        elif code == 0x6A:  # LONG_BINGET
            push(memo[int_from(raw[at : at + 4], "little")])
            at += 4
        elif code == 0x75:  # SETITEMS
            start = marks.pop()
            if start <= (marks[-1] if marks else 0):
                raise InvalidPickle("a value is missing")
            set_dict_items(stack[start - 1], stack[start:])
            del stack[start:]
        elif code == 0x8A:  # LONG1
            size = raw[at]
            if size > MAX_INTEGER_BYTES:
                raise ForbiddenOpcode(f"an integer of {size:,} bytes")
            push(int_from(raw[at + 1 : at + 1 + size], "little", signed=True))
            at += 1 + size
        elif code == 0x4E:  # NONE
            push(None)
        elif code == 0x89:  # NEWFALSE
            push(False)
        elif code == 0x88:  # NEWTRUE
            push(True)
        elif code == 0x4A:  # BININT
            push(int_from(raw[at : at + 4], "little", signed=True))
            at += 4
        elif code == 0x94:  # MEMOIZE
            memo.append(stack[-1])
        elif code == 0x61:  # APPEND
            value = pop()
            if type(stack[-1]) is not list:
                raise InvalidPickle("a value is appended to what is no list")
            stack[-1].append(value)
        elif code == 0x58:  # BINUNICODE
            size = int_from(read_argument(raw, at, 4), "little")
            push(read_argument(raw, at + 4, size).decode("utf-8", "replace"))
            at += 4 + size
        elif code == 0x2E:  # STOP
            if len(stack) != 1 or marks:
                raise InvalidPickle(f"it ends with {len(stack)} values instead of one")
            return stack[0]
        else:
            handler = HANDLERS.get(code)
            if handler is None:
                raise _refusal(code, at - 1)
            at = handler(state, at)
    raise InvalidPickle(f"it breaks off after {length:,} bytes")


def _refusal(code: int, at: int) -> Exception:
    sign = chr(code)
    if sign in _DANGEROUS:
        return ForbiddenOpcode(
            f"opcode {_DANGEROUS[sign]} at byte {at:,} would import or call something"
        )
    if sign in _UNKNOWN:
        return ForbiddenOpcode(f"opcode {_UNKNOWN[sign]} at byte {at:,} builds what no dump holds")
    return InvalidPickle(f"byte {at:,} is no opcode (0x{code:02x})")
