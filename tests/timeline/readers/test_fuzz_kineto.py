"""Mutated traces: an answer or an `InputError`, never anything else."""

import json
import random
from pathlib import Path
from typing import cast

import pytest

from meshwright.errors import DamagedFile, InputError
from meshwright.timeline import Timeline
from meshwright.timeline.readers.kineto import Detail, read_kineto

EVENTS = [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "python"}},
    {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": 1, "tid": 2, "ts": 1.5,
     "dur": 9.25, "args": {"Collective name": "allreduce", "In msg nelems": 8, "dtype": "Float"}},
    {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 2,
     "ts": 2, "dur": 1, "args": {"correlation": 5}},
    {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32", "pid": 0, "tid": 7,
     "ts": 1712195495519689.047, "dur": 4, "args": {"device": 0, "stream": 7, "correlation": 5}},
    {"ph": "B", "name": "a", "ts": 1, "pid": 1, "tid": 2}, {"ph": "E", "ts": 3, "pid": 1, "tid": 2},
    {"ph": "i", "name": "[memory]", "ts": 4,
     "args": {"Device Type": 1, "Device Id": 0, "Bytes": 1}},
    {"ph": "C", "name": "power", "ts": 5, "args": {"W": 3}},
]  # fmt: skip
SEEDS = [
    json.dumps(
        {"distributedInfo": {"rank": 1}, "traceEvents": EVENTS * 3, "baseTimeNanoseconds": 7}
    ),
    json.dumps({"traceEvents": EVENTS}, indent=2),
    json.dumps(EVENTS),
]
PIECES = [
    b'"', b"{", b"}", b"[", b"]", b",", b":", b"\\", b"\xff", b"null", b"-", b"1e999", b"9" * 30,
    b'"ts": "x"', b'"ph": 1', b"nan", b"\x00", b"\\ud800", b'"args": [', b"0.5", b"[" * 50,
]  # fmt: skip


def mutated(seed: bytes, dice: random.Random) -> bytes:
    text = bytearray(seed)
    for _ in range(dice.randint(1, 6)):
        at = dice.randrange(len(text) + 1)
        match dice.randrange(4):
            case 0:
                text[at : at + dice.randint(1, 40)] = b""
            case 1:
                text[at:at] = dice.choice(PIECES)
            case 2:
                text[at : at + 1] = bytes([dice.randrange(256)])
            case _:
                begin = dice.randrange(len(text) + 1)
                text[at:at] = text[begin : begin + dice.randint(1, 200)]
    return bytes(text[: dice.randrange(len(text) + 1)] if dice.random() < 0.1 else text)


def check(path: Path, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in seeds:
        dice = random.Random(number)
        path.write_bytes(mutated(dice.choice(SEEDS).encode(), dice))
        size = dice.choice([100, 700, 1 << 19])
        monkeypatch.setattr("meshwright.timeline.readers.kineto.BUFFER_BYTES", size)
        try:
            timeline = read_kineto(path, detail=dice.choice(list(Detail)))
        except DamagedFile as damage:
            timeline = cast(Timeline, damage.kept)
        except InputError:
            continue
        # Whatever was read passes the checks that columns from outside pass.
        spans = {name: timeline.spans.column(name) for name in timeline.spans.column_names}
        counters = {name: timeline.counters.column(name) for name in timeline.counters.column_names}
        Timeline.from_columns(spans, counters, source="measured")


def test_a_thousand_mutated_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tmp_path / "trace.json", range(1000), monkeypatch)


@pytest.mark.slow
def test_many_mutated_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(tmp_path / "trace.json", range(1000, 20_000), monkeypatch)
