"""Mutated dumps and snapshots through both readers and analyses: `python -m … 50000 [seed]`.

Every file must end in an answer or an `InputError`, in bounded time and memory.
"""

import gzip
import pickle
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import InputError
from meshwright.observe.analyze.hang import diagnose
from meshwright.observe.analyze.memory import memory_report
from meshwright.timeline.readers.flight_recorder import Dumps, parse_dump
from meshwright.timeline.readers.memory_snapshot import parse_snapshot
from meshwright.timeline.readers.plain_pickle import decompress, loads
from tests.timeline.readers.small_dumps import STACK, dump, entry, event, snapshot

_ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, -(2**63), 2**70, 1.5, float("nan"), "", "x", b"\xff", (), [], {},
    [[]], {"a": 1}, "0->1", "[0, 1, 99999999999]", [[1] * 50] * 50,
)  # fmt: skip
_BYTES = (
    b"cos\nsystem\n", b"R", b"\x93", b"\x81", b"b", b"\x82\x01", b"\x8d" + b"\xff" * 8,
    b"r\xff\xff\xff\xff", b"(", b"]", b"}", b"e", b"u", b"t", b"2", b"0", b".", b"\x94", b"h\x00",
    b"\x86",
)  # fmt: skip


class Result(NamedTuple):
    """What a run of the fuzzer came to."""

    cases: int
    answered: int
    refused: int
    longest_s: float
    peak_mib: float


def seeds() -> list[tuple[str, Any]]:
    """Return what is mutated: plain data of both kinds."""
    p2p = entry(9, is_p2p=True, profiling_name="nccl:send 0->1", p2p_seq_id=4, frames=STACK)
    blocks = [event("alloc", 512 * n, 512) for n in range(8)]
    blocks += [event("free_requested", 512, 512), event("free_completed", 512, 512)]
    blocks += [event("oom", 99, 4096), event("segment_alloc", 0, 4096)]
    return [
        ("hang", dump([entry(7), entry(8, frames=STACK), p2p])),
        ("hang", dump([])),
        ("memory", snapshot(blocks, active=3584)),
    ]


def _mutate_value(value: Any, rng: random.Random) -> Any:
    """Replace, drop or repeat one thing somewhere inside."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        changed = dict(value)
        if rng.random() < 0.1:
            del changed[key]
        else:
            changed[key] = _mutate_value(value[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.9:
        changed_list = list(value)
        at = rng.randrange(len(value))
        if rng.random() < 0.2:
            changed_list[at:at] = [value[at]] * rng.randint(1, 300)
        else:
            changed_list[at] = _mutate_value(value[at], rng)
        return changed_list
    return rng.choice(_ODD)


def _mutate_bytes(raw: bytes, rng: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data) + 1)
        way = rng.random()
        if way < 0.4 and at < len(data):
            data[at] = rng.randrange(256)
        elif way < 0.6:
            data[at:at] = rng.choice(_BYTES)
        elif way < 0.75:
            del data[at : at + rng.randint(1, 20)]
        elif way < 0.9:
            data[at:at] = data[at : at + rng.randint(1, 200)] * rng.randint(1, 20)
        else:
            del data[at:]
    return bytes(data)


def _through(kind: str, raw: bytes) -> None:
    raw = decompress(raw, "case")
    data = loads(raw, "case")
    if kind == "hang":
        one = parse_dump(data, "case", 0, len(raw))
        two = parse_dump(dump([entry(7)]), "other", 1, 9999)
        diagnose(Dumps((one, two) if one.rank != 1 else (one,), {2: "broken"}, ()))
    else:
        memory_report(parse_snapshot(data, "case", len(raw)))


def fuzz(cases: int, seed: int = 0, more: list[tuple[str, bytes]] | None = None) -> Result:
    """Run mutated files through; anything but an answer or an `InputError` is raised."""
    rng = random.Random(seed)
    values = seeds()
    files = more or []
    answered = refused = 0
    longest = 0.0
    for _ in range(cases):
        if files and rng.random() < 0.2:
            kind, raw = rng.choice(files)
            raw = _mutate_bytes(raw, rng)
        else:
            kind, value = rng.choice(values)
            for _ in range(rng.randint(0, 3)):
                value = _mutate_value(value, rng)
            raw = pickle.dumps(value, rng.randint(0, 5))
            if rng.random() < 0.6:
                raw = _mutate_bytes(raw, rng)
        if rng.random() < 0.05:
            raw = gzip.compress(raw, 1)
            raw = _mutate_bytes(raw, rng) if rng.random() < 0.5 else raw
        began = time.process_time()
        try:
            _through(kind, raw)
            answered += 1
        except InputError:
            refused += 1
        except BaseException:
            sys.stderr.write(f"fuzz case of {kind}: {raw!r}\n")
            raise
        longest = max(longest, time.process_time() - began)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Result(cases, answered, refused, longest, peak)


def real_files(shared: Path) -> list[tuple[str, bytes]]:
    """Return real dumps to mutate; snapshots are too large for many cases."""
    folder = shared / "traces" / "nvrx-flight-recorder"
    return [("hang", path.read_bytes()) for path in sorted(folder.glob("*/_dump_*"))]


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
    start = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    beside = Path(__file__).resolve().parents[3].parent / "shared"
    sys.stdout.write(f"{fuzz(count, start, real_files(beside))}\n")
