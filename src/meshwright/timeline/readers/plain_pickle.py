"""Reads pickles of strangers: builds plain containers and scalars, runs nothing, stays in bounds.

Python's own unpickler calls whatever a file names. This one is an interpreter of its own that knows
only the opcodes which push a scalar, build a list, a tuple or a dict, or fetch from the memo. Every
other opcode (GLOBAL, REDUCE, BUILD, INST, OBJ, NEWOBJ, EXT, PERSID, buffers, sets) is refused by
name: there is no path from a file's bytes to an import or a call.

Bounds, each linear in the file: a declared length must lie within the bytes left; integers have at
most 64 bytes; containers are at most one per 16 bytes; keys are words and small integers, so that
no key's hash costs more than its bytes and crafted collisions have no effect; and a compressed file
may grow by a bounded factor. Lists shared through the memo stay shared: readers that unfold
them count what they unfold. Opcodes: CPython's Lib/pickletools.py.
"""

import gc
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshwright.errors import DamagedFile, InputError, Problem
from meshwright.timeline.readers.pickle_opcodes import (
    CONTAINERS,
    HANDLERS,
    Broken,
    Refused,
    State,
    cut,
)

MAX_BYTES = 4 << 30
"""Most bytes of one file, after decompression."""
_FREE_BYTES = 16 << 20
_MAX_RATIO = 300
"""Past the first 16 MiB a compressed file may not grow by more: real snapshots reach 10 to 40."""
_BYTES_PER_CONTAINER = 16
"""Real dumps have one for each 24 bytes, real snapshots one for each 97."""
_FREE_CONTAINERS = 4096
_DANGEROUS = {
    "c": "GLOBAL", "\x93": "STACK_GLOBAL", "R": "REDUCE", "b": "BUILD", "i": "INST", "o": "OBJ",
    "\x81": "NEWOBJ", "\x92": "NEWOBJ_EX", "\x82": "EXT1", "\x83": "EXT2", "\x84": "EXT4",
    "P": "PERSID", "Q": "BINPERSID",
}  # fmt: skip
_UNKNOWN = {
    "\x8f": "EMPTY_SET", "\x90": "ADDITEMS", "\x91": "FROZENSET", "\x97": "NEXT_BUFFER",
    "\x98": "READONLY_BUFFER",
}  # fmt: skip


def read_plain_pickle(path: str | Path) -> Any:
    """Read one pickle file, plain or compressed by gzip."""
    path = Path(path)
    return loads(read_bounded(path), str(path))


def read_bounded(path: Path) -> bytes:
    """Read a file's bytes, decompressed where it is a gzip file, within bounds."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InputError([Problem(str(path), f"is larger than {MAX_BYTES >> 30} GiB", "")])
        raw = path.read_bytes()
    except OSError as error:
        what = f"cannot be read: {error.strerror or error}"
        raise InputError([Problem(str(path), what, "name a file that can be read")]) from None
    return decompress(raw, str(path))


def decompress(raw: bytes, where: str) -> bytes:
    """Return what a gzip file holds, or the bytes themselves where it is none."""
    if raw[:2] != b"\x1f\x8b":
        return raw
    most = min(MAX_BYTES, max(_FREE_BYTES, len(raw) * _MAX_RATIO))
    whole, rest = bytearray(), raw
    try:
        while rest[:2] == b"\x1f\x8b":
            member = zlib.decompressobj(wbits=31)
            whole += member.decompress(rest, most + 1 - len(whole))
            if len(whole) > most:
                what = f"decompresses to more than {most >> 20} MiB from {len(raw):,} bytes"
                raise InputError([Problem(where, what, "decompress it and look what it is")])
            if not member.eof:
                raise DamagedFile([Problem(where, "the compressed data break off", _AGAIN)])
            rest = member.unused_data
    except zlib.error as error:
        raise DamagedFile([Problem(where, f"is no whole gzip file: {error}", _AGAIN)]) from None
    return bytes(whole)


@contextmanager
def without_collection() -> Iterator[None]:
    """Make many containers without looking for cycles among them: a quarter of the time else."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def loads(raw: bytes, where: str = "pickle") -> Any:
    """Build the plain value that a pickle's bytes describe; refuse any that need more."""
    try:
        with without_collection():
            return _interpret(raw)
    except Refused as error:
        fix = "do not load it with pickle or torch: it can run code; ask where it comes from"
        raise InputError([Problem(where, f"refused: {error}", fix)]) from None
    except (Broken, IndexError, KeyError, struct.error) as error:
        what = str(error) if isinstance(error, Broken) else "an opcode lacks what it works on"
        raise DamagedFile([Problem(where, f"is no whole pickle: {what}", _AGAIN)]) from None


_AGAIN = "copy it again from where it was written, or leave it out"


def _interpret(raw: bytes) -> Any:  # noqa: C901, PLR0912, PLR0915 - the opcodes in one loop, for speed
    """Run the opcodes. The most frequent stand first, and in the loop itself."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    state = State(raw, stack, marks, memo)
    push, pop, length, at = stack.append, stack.pop, len(raw), 0
    containers_left = length // _BYTES_PER_CONTAINER + _FREE_CONTAINERS
    int_from = int.from_bytes
    while at < length:
        code = raw[at]
        at += 1
        if code == 0x68:  # BINGET
            push(memo[raw[at]])
            at += 1
        elif code == 0x71:  # BINPUT
            memo[raw[at]] = stack[-1]
            at += 1
        elif code == 0x4B:  # BININT1
            push(raw[at])
            at += 1
        elif code == 0x6A:  # LONG_BINGET
            push(memo[int_from(raw[at : at + 4], "little")])
            at += 4
        elif code == 0x72:  # LONG_BINPUT
            memo[int_from(cut(raw, at, 4), "little")] = stack[-1]
            at += 4
        elif code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif code == 0x28:  # MARK
            marks.append(len(stack))
        elif code == 0x4A:  # BININT
            push(int_from(cut(raw, at, 4), "little", signed=True))
            at += 4
        elif code in _EMPTY or code in CONTAINERS:
            containers_left -= 1
            if not containers_left:
                raise Refused("it builds more containers than its size can mean")
            if code == 0x5D:  # EMPTY_LIST
                push([])
            elif code == 0x7D:  # EMPTY_DICT
                push({})
            else:
                CONTAINERS[code](state)
        elif code == 0x61:  # APPEND
            value = pop()
            if type(stack[-1]) is not list:
                raise Broken("a value is appended to what is no list")
            stack[-1].append(value)
        elif code == 0x4E:  # NONE
            push(None)
        elif code == 0x58:  # BINUNICODE
            size = int_from(cut(raw, at, 4), "little")
            push(cut(raw, at + 4, size).decode("utf-8", "replace"))
            at += 4 + size
        elif code == 0x4D:  # BININT2
            push(int_from(cut(raw, at, 2), "little"))
            at += 2
        elif code == 0x2E:  # STOP
            if len(stack) != 1 or marks:
                raise Broken(f"it ends with {len(stack)} values instead of one")
            return stack[0]
        else:
            handler = HANDLERS.get(code)
            if handler is None:
                raise _refusal(code, at - 1)
            at = handler(state, at)
    raise Broken(f"it breaks off after {length:,} bytes")


_EMPTY = frozenset(b"]}")


def _refusal(code: int, at: int) -> Exception:
    sign = chr(code)
    if sign in _DANGEROUS:
        return Refused(f"opcode {_DANGEROUS[sign]} at byte {at:,} would import or call something")
    if sign in _UNKNOWN:
        return Refused(f"opcode {_UNKNOWN[sign]} at byte {at:,} builds what no dump holds")
    return Broken(f"byte {at:,} is no opcode (0x{code:02x})")
