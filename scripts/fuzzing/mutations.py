"""Ways to spoil a file: its bytes, its values, its compression, its opcodes."""

import gzip
import json
import pickle
import random
from pathlib import Path
from typing import Any

NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2**31, 2**32 - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63), 10**40, 1e308, -1e308,
    5e-324, float("nan"), float("inf"), float("-inf"), 0.1, 1.5,
)  # fmt: skip
ODD: tuple[Any, ...] = (
    None, True, False, "", "x", "-1", "1e999", "0x7f", "[0, 1, 99999999999]", "\x00", "ä" * 50,
    "x" * 9000, "\ud800", [], {}, [[]], {"a": 1}, [1, "2", None], "0->1", [[1] * 50] * 50,
    {"name": {"name": {}}}, "ProfilerStep#99999999999999999999", "ncclDevKernel_AllReduce", "NaN",
    *NUMBERS,
)  # fmt: skip
PIECES = (
    b"\xff", b"\x00", b"\x80" * 11, b"{", b"}", b"[", b"]", b'"', b",", b":", b"\\", b"[" * 60,
    b'{"a":' * 60, b"9" * 40, b"-1", b"1e999", b"1e308", b"9223372036854775808", b"NaN",
    b"Infinity", b"-Infinity", b"null", b"true", b'"ts": "x"', b'"ph": 1', b'"ph": "X",',
    b'"args": [', b"\\ud800", b"\\u0000", b"\n", b"\r", b"0x", b"nranks", b"NCCL INFO ",
    b" comm 0x", b"\xef\xbb\xbf", b'"traceEvents": [], ', b'"entries": 1, ', b"/*", b"PAR1",
    b"SQLite format 3\x00", b"cos\nsystem\n", b"R", b"\x93", b"\x81", b"b", b"\x82\x01",
    b"\x8d" + b"\xff" * 8, b"(", b"e", b"r\xff\xff\xff\xff", b"u", b"t", b"2" * 30, b"0", b".",
    b"\x94", b"h\x00", b"\x86", b"Q", b"o", b"\x95\xff\xff\xff\xff\xff\xff\xff\x7f",
    b"\x8b\xff\xff\xff\x7f", b"I99999999999999999999\n",
)  # fmt: skip


def spoiled_bytes(data: bytes, rng: random.Random, other: bytes = b"") -> bytes:
    """Flip, insert, delete, repeat, splice or cut off bytes."""
    found = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        at, way = rng.randrange(len(found) + 1), rng.random()
        if way < 0.3 and at < len(found):
            found[at] = rng.randrange(256)
        elif way < 0.4 and at < len(found):
            found[at] ^= 1 << rng.randrange(8)
        elif way < 0.6:
            found[at : at + rng.choice((0, 0, 1, 8))] = rng.choice(PIECES)
        elif way < 0.72:
            del found[at : at + rng.choice((1, 3, 20, 300, 4096))]
        elif way < 0.84:
            begin = rng.randrange(len(found) + 1)
            piece = found[begin : begin + rng.choice((4, 40, 600))]
            found[at:at] = piece * rng.choice((1, 1, 2, 20))
        elif way < 0.92 and other:
            begin = rng.randrange(len(other))
            found[at : at + rng.choice((0, 40, 600))] = other[begin : begin + 600]
        else:
            del found[at:]
    return bytes(found)


def spoiled_value(value: Any, rng: random.Random) -> Any:
    """Replace, drop, add or repeat one thing somewhere inside."""
    if isinstance(value, dict) and value and rng.random() < 0.92:
        key = rng.choice(list(value))
        changed = dict(value)
        way = rng.random()
        if way < 0.1:
            del changed[key]
        elif way < 0.15:
            changed[rng.choice(("ts", "dur", "ph", "id", "name", "ranks", "x"))] = rng.choice(ODD)
        elif way < 0.2:
            changed[str(rng.choice(ODD))[:40]] = changed.pop(key)
        else:
            changed[key] = spoiled_value(value[key], rng)
        return changed
    if isinstance(value, list | tuple) and value and rng.random() < 0.92:
        items = list(value)
        at, way = rng.randrange(len(items)), rng.random()
        if way < 0.12:
            items[at:at] = [items[at]] * rng.choice((1, 2, 300))
        elif way < 0.18:
            del items[at]
        elif way < 0.24:
            rng.shuffle(items)
        else:
            items[at] = spoiled_value(items[at], rng)
        return items
    if isinstance(value, int | float) and not isinstance(value, bool) and rng.random() < 0.6:
        return rng.choice(NUMBERS)
    return rng.choice(ODD)


def as_json(value: Any, rng: random.Random) -> bytes:
    """Write a value as JSON, at times with a key twice, without end, or far too deep."""
    text = json.dumps(value, indent=rng.choice((None, None, 1)))
    if rng.random() < 0.05 and "{" in text:
        at = text.index("{", rng.randrange(max(1, text.rindex("{"))) or 0)
        twice = rng.choice(
            ('"traceEvents": 7, ', '"name": null, ', '"ph": "X", ', '"entries": [],')
        )
        text = text[: at + 1] + twice + text[at + 1 :]
    if rng.random() < 0.01:
        depth = rng.choice((50, 900, 20_000, 200_000))
        at = rng.randrange(len(text) + 1)
        text = text[:at] + rng.choice(("[", '{"a":')) * depth + text[at:]
    return text.encode("utf-8", "surrogatepass")


def as_pickle(value: Any, rng: random.Random) -> bytes:
    """Write a value as a pickle of any protocol."""
    return pickle.dumps(value, rng.randint(0, 5))


def compressed(data: bytes, rng: random.Random) -> bytes:
    """Compress as gzip: whole, in two members, spoiled, or padded to a bomb."""
    way = rng.random()
    if way < 0.01:
        return gzip.compress(data + b" " * (48 << 20), 9)
    if way < 0.02:
        return gzip.compress(b"\x00" * (48 << 20), 9) + gzip.compress(data, 1)
    if way < 0.3:
        half = rng.randrange(len(data) + 1)
        return gzip.compress(data[:half], 1) + gzip.compress(data[half:], 1)
    packed = gzip.compress(data, 1)
    return spoiled_bytes(packed, rng) if way < 0.65 else packed


class _Calls:
    """An object that a real unpickler would make by calling something."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def payloads(canary: Path) -> list[Any]:
    """Return real payloads: loaded by Python's own unpickler each would leave the canary's file."""
    import builtins
    import os
    import subprocess

    code = f"__import__('pathlib').Path({str(canary)!r}).touch()"
    return [
        _Calls(os.system, f"touch {canary}"),
        _Calls(subprocess.call, ["touch", str(canary)]),
        _Calls(builtins.eval, code),
        _Calls(builtins.exec, code),
        _Calls(Path.touch, canary),
        _Calls(builtins.open, str(canary), "w"),
    ]


def opcodes(canary: Path) -> list[bytes]:
    """Return attacks that are written opcode by opcode."""
    name = str(canary).encode()
    touch = b"(S'touch " + name + b"'\n"
    laughs = b"\x80\x02]q\x00" + b"".join(
        b"](h" + bytes([n]) + b"h" + bytes([n]) + b"eq" + bytes([n + 1]) for n in range(60)
    )
    return [
        b"cos\nsystem\n" + touch + b"tR.",
        touch + b"ios\nsystem\n.",
        b"(cos\nsystem\nS'touch " + name + b"'\no.",
        b"\x80\x02cos\nsystem\nS'x'\n\x85\x81.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x05touch\x85R.",
        b"\x80\x02}(S'__setstate__'\ncos\nsystem\nubS'touch'\nb.",
        b"\x80\x02\x82\x01.", b"\x80\x02\x83\x01\x00.", b"\x80\x02\x84\x01\x00\x00\x00.",
        b"Pevil\n.", b"\x80\x02K\x01Q.", b"\x80\x05\x97.", b"\x80\x04\x8f(K\x01\x90.",
        b"\x80\x02" + b"(" * 20_000 + b".",
        b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b".",
        b"\x80\x02K\x00" + b"\x85" * 20_000 + b".",
        b"\x80\x02]" + b"2" * 20_000 + b".",
        b"\x80\x02]q\x00" + b"h\x00a" * 3 + b".",
        b"\x80\x02}q\x00(X\x07\x00\x00\x00entriesh\x00u.",
        laughs + b"\x86.",
        b"\x80\x02}X\x07\x00\x00\x00entries" + laughs[2:] + b"0" * 59 + b"s.",
        b"\x80\x02\x8b\xff\xff\xff\x7f.", b"\x80\x04\x8d" + b"\xff" * 8 + b".",
        b"L" + b"9" * 100_000 + b"L\n.", b"F1e400\n.", b"\x80\x02]r\xff\xff\xff\xff.",
    ]  # fmt: skip
