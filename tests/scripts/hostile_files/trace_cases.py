"""Hostile traces, dumps and logs, by the target of `scripts.fuzzing` that reads them."""

import gzip
import json
import pickle
import struct
from typing import Any

from tests.timeline.readers.probe_chains import integers_on_one_probe_chain
from tests.timeline.readers.small_dumps import dump, entry, event, snapshot

Cases = dict[tuple[str, str], bytes]
_KERNEL: dict[str, Any] = {
    "ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1, "dur": 2,
    "args": {"device": 0, "stream": 7, "correlation": 1},
}  # fmt: skip
_ODD_NUMBERS = (
    "1e308", "-1e308", "1e999", "NaN", "Infinity", "-Infinity", "9223372036854775808", "1e-400",
    "-9223372036854775809", "9" * 5000, "1." + "3" * 5000, "0.1e-99999", '"1e308"', "[1]", "null",
)  # fmt: skip


def zeros_as_gzip(mebibytes: int, byte: bytes = b"\0") -> bytes:
    """Return a gzip file that unpacks to so much, made quickly: one member for each mebibyte."""
    return gzip.compress(byte * (1 << 20), 9) * mebibytes


def trace_cases() -> Cases:
    """Return files for the readers of traces."""
    found: Cases = {}
    for number in _ODD_NUMBERS:
        for field in ("ts", "dur", "pid"):
            row = json.dumps(_KERNEL | {field: 77777}).replace("77777", number)
            found["kineto", f"{field} {number[:12]}"] = f'{{"traceEvents": [{row}]}}'.encode()
    for field in ("device", "stream", "correlation"):
        for far in (2**31, 2**62, -1, 10**40):
            changed: dict[str, Any] = _KERNEL["args"] | {field: far}
            row = json.dumps(_KERNEL | {"args": changed})
            found["kineto", f"{field} {far:.0e}"] = f'{{"traceEvents": [{row}]}}'.encode()
    world = {"distributedInfo": {"rank": 10**12, "world_size": 10**15}, "traceEvents": [_KERNEL]}
    ranks = [_KERNEL | {"args": {"Process Group Ranks": "[0, 1, 99999999999]", "rank": 10**18}}]
    steps = [
        _KERNEL | {"cat": "user_annotation", "name": f"ProfilerStep#{10**n}"} for n in range(30)
    ]
    found |= {
        ("kineto", "a quadrillion ranks"): json.dumps(world).encode(),
        ("kineto", "a far rank in a group"): json.dumps({"traceEvents": ranks}).encode(),
        ("kineto", "far steps"): json.dumps({"traceEvents": steps}).encode(),
        ("kineto", "deep lists"): b'{"traceEvents": ' + b"[" * 50_000,
        ("kineto", "deep objects"): b'{"traceEvents": [' + b'{"args":' * 20_000,
        ("kineto", "events never end"): b'{"traceEvents": [' + b'{"ph": "X"}, ' * 5_000,
        ("kineto", "key twice"): b'{"traceEvents": 7, "traceEvents": []}',
        ("kineto", "a long name"): json.dumps({"traceEvents": [_KERNEL | {"name": "k" * 60_000}]}
                                              ).encode(),
        ("kineto", "lone surrogates"): b'{"traceEvents": [{"ph": "X", "name": "\\ud800"}]}',
        ("kineto", "NUL"): b'{"traceEvents": [{"ph": "X", "name": "\x00"}]}',
        ("kineto", "begins without ends"): json.dumps(
            {"traceEvents": [{"ph": "B", "name": "a", "ts": n, "pid": 1, "tid": 1}
                             for n in range(3_000)]}).encode(),
        ("kineto", "ends without begins"): json.dumps(
            {"traceEvents": [{"ph": "E", "ts": n, "pid": 1, "tid": 1} for n in range(3_000)]}
        ).encode(),
        ("kineto", "gzip bomb"): gzip.compress(b'{"traceEvents": [') + zeros_as_gzip(70),
        ("kineto", "gzip cut off"): gzip.compress(json.dumps(world).encode())[:40],
        ("kineto", "gzip in gzip"): gzip.compress(gzip.compress(b"{}")),
        ("kineto", "gzip members"): gzip.compress(b"") * 3_000,
        ("perfetto", "deep"): b'{"traceEvents": ' + b"[" * 50_000,
        ("nccl_log", "a long line"): b"host:1:2 [0] NCCL INFO " + b"x" * 60_000,
        ("nccl_log", "many channels"): b"h:1:2 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0]\n" * 900,
        ("nccl_log", "far ranks"): b"h:1:2 [0] NCCL INFO comm 0x1 rank 999999999999 nranks "
                                   b"999999999999999 cudaDev 0 - Init COMPLETE\n",
        ("nccl_log", "no line ends"): b"NCCL INFO " * 6_000,
        ("nccl_log", "binary"): bytes(range(256)) * 200,
        ("nccl_inspector", "deep"): b'{"a":' * 20_000,
        ("nccl_inspector", "long"): b'{"header": "' + b"x" * 60_000 + b'"}',
        ("execution_trace", "deep"): b'{"nodes": ' + b"[" * 50_000,
        ("execution_trace", "a far parent"): json.dumps(
            {"schema": "1.1.1-chakra.0.0.4", "nodes": [{"id": 10**30, "ctrl_deps": 10**30}]}
        ).encode(),
        ("execution_trace", "protobuf length"): b"\xff" * 9 + b"\x01" + b"\x0a" * 100,
        ("execution_trace", "protobuf varint"): b"\x08" + b"\xff" * 3_000,
    }  # fmt: skip
    return found


def _words(count: int) -> bytes:
    return b"".join(b"X\x04\x00\x00\x00" + b"%04d" % number for number in range(count))


def pickle_cases() -> Cases:
    """Return files for the readers of pickles."""
    chain = integers_on_one_probe_chain(12)
    laughs = b"\x80\x02]q\x00" + b"".join(
        b"](h" + bytes([n]) + b"h" + bytes([n]) + b"eq" + bytes([n + 1]) for n in range(90)
    )
    bodies = {
        "probe chain": pickle.dumps(dict.fromkeys(chain), 2),
        "probe chain of pairs": pickle.dumps([{key: 0} for key in chain], 2),
        "equal hashes": pickle.dumps({(2**61 - 1) * n: 0 for n in range(1, 2_000)}, 4),
        "floats as keys": pickle.dumps({float(n): 0 for n in range(2_000)}, 4),
        "tuples as keys": pickle.dumps({(n, (n, n)): 0 for n in range(500)}, 4),
        "shared lists": laughs + b".",
        "shared lists in the events": b"\x80\x02}X\x0d\x00\x00\x00device_traces" + laughs[2:]
                                      + b"0" * 89 + b"s.",
        "shared tuples": b"\x80\x02)" + b"2\x86" * 4_000 + b".",
        "a list in itself": b"\x80\x02]q\x00h\x00a.",
        "a dict in itself": b"\x80\x02}q\x00X\x01\x00\x00\x00ah\x00s.",
        "deep lists": b"\x80\x02" + b"]" * 20_000 + b"a" * 19_999 + b".",
        "deep tuples": b"\x80\x02K\x00" + b"\x85" * 4_000 + b".",
        "deep marks": b"\x80\x02" + b"(" * 20_000 + b".",
        "a huge integer": b"\x80\x02\x8b\xff\xff\x00\x00" + b"\x7f" * 65_535 + b".",
        "a claimed integer": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "a decimal integer": b"L" + b"9" * 60_000 + b"L\n.",
        "a decimal": b"I" + b"9" * 60_000 + b"\n.",
        "a float": b"F" + b"9" * 60_000 + b"\n.",
        "a claimed word": b"\x80\x04\x8d" + b"\xff" * 8 + b".",
        "a claimed frame": b"\x80\x04\x95" + b"\xff" * 8 + b"N.",
        "a far memo": b"\x80\x02Nr\xff\xff\xff\xff.",
        "a far memo in a line": b"Np999999999999\n.",
        "no memo": b"\x80\x02h\x07.",
        "a set": b"\x80\x04\x8f(K\x01K\x02\x90.",
        "a frozen set": b"\x80\x04(K\x01K\x02\x91.",
        "a buffer": b"\x80\x05\x97.",
        "an extension": b"\x80\x02\x82\x01.",
        "a call": b"cos\nsystem\n(S'true'\ntR.",
        "an object": b"\x80\x02cos\nsystem\n)\x81.",
        "a state": b"\x80\x02}}b.",
        "a person": b"Pid\n.",
        "many words": b"\x80\x02](" + _words(6_000) + b"e.",
        "many pairs": b"\x80\x02}(" + _words(6_000) + b"u.",
        "odd pairs": b"\x80\x02}(" + _words(5) + b"u.",
        "appended to a word": b"\x80\x02X\x01\x00\x00\x00a(K\x01e.",
        "set in a list": b"\x80\x02](K\x01K\x02u.",
        "nothing": b"",
        "stop": b".",
        "no stop": b"\x80\x02" + b"N" * 60_000,
        "other bytes": bytes(range(256)) * 100,
        "surrogates": b"\x80\x02X\x03\x00\x00\x00\xed\xa0\x80.",
        "escapes": b"V" + b"\\u0041" * 9_000 + b"\n.",
        "a quoted word": b"S'" + b"\\x41" * 9_000 + b"'\n.",
    }  # fmt: skip
    found: Cases = {}
    for name, body in bodies.items():
        found["memory_snapshot", name] = body
        found["flight_recorder", name] = body
    found |= _dump_cases()
    return found


def _dump_cases() -> Cases:
    odd: tuple[Any, ...] = (10**30, -1, 1e308, float("nan"), "x" * 9_000, [[1] * 50] * 50, None)
    found: Cases = {}
    for number, value in enumerate(odd):
        whole = dump([entry(7)])
        whole["entries"][0] |= {"collective_seq_id": value, "input_sizes": value, "frames": value}
        found["flight_recorder", f"an odd entry {number}"] = pickle.dumps(whole, 2)
        rows = [event("alloc", 512, 512) | {"addr": value, "size": value, "time_us": value}]
        found["memory_snapshot", f"an odd event {number}"] = pickle.dumps(snapshot(rows, active=0))
    ends = [event("alloc", 512 * (4_000 - number), 512) for number in range(4_000)]
    found["memory_snapshot", "addresses that descend"] = pickle.dumps(snapshot(ends, active=0))
    chain = [event("alloc", number, 512) for number in integers_on_one_probe_chain(12)]
    found["memory_snapshot", "addresses on a probe chain"] = pickle.dumps(snapshot(chain, active=0))
    found["flight_recorder", "a packed dump"] = struct.pack("<I", 0x04034B50) + bytes(99)
    found["flight_recorder", "JSON too deep"] = b'{"entries": ' + b"[" * 50_000
    found["flight_recorder", "a pickle bomb"] = gzip.compress(b"\x80\x02") + zeros_as_gzip(12)
    return found
