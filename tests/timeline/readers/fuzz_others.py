"""Mutated exports, graphs and logs through their readers: `python -m … 50000 [seed]`.

Every file must end in an answer or an `InputError`, in bounded time and memory.
"""

import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import DamagedFile, InputError
from meshwright.timeline import Timeline
from meshwright.timeline.readers.execution_trace import read_execution_trace, timeline_of
from meshwright.timeline.readers.nccl_inspector import read_nccl_inspector
from meshwright.timeline.readers.nccl_log import read_nccl_log
from meshwright.timeline.readers.nccl_log import timeline_of as timeline_of_log
from meshwright.timeline.readers.nsight import read_nsight
from meshwright.timeline.schema import SPANS
from tests.timeline.readers.small_chakra import COMPUTE, REDUCE, trace
from tests.timeline.readers.small_nsight import (
    KERNEL,
    NVTX,
    RUNTIME,
    call,
    export,
    kernel,
    nvtx,
    payload,
    usual,
)
from tests.timeline.readers.test_execution_trace import NEW, OLD
from tests.timeline.readers.test_nccl_inspector import TIMES, record
from tests.timeline.readers.test_nccl_log import LOG

_ODD: tuple[object, ...] = (
    None, -1, 0, 2**63 - 1, -(2**63), 1.5e300, float("inf"), "", "x" * 9000, b"\xff\x00", "1e9",
    b"\x01" * 64, 2**32 - 1,
)  # fmt: skip
_PIECES = (
    b"\xff", b"\x00", b"\x80" * 11, b"{", b"}", b"[", b'"', b",", b"[" * 60, b"9" * 40, b"-1",
    b"1e999", b"null", b"nranks", b"NCCL INFO ", b" comm 0x", b"\n", b"\r", b"\\ud800", b"0x",
)  # fmt: skip


class Result(NamedTuple):
    """What a run of the fuzzer came to."""

    answered: int
    damaged: int
    refused: int
    longest_s: float
    peak_mib: float


def _checked(timeline: Timeline) -> None:
    """Fail where a timeline breaks its own rules: it is made anew of its columns."""
    given = {name: timeline.spans.column(name) for name in timeline.spans.column_names}
    assert set(given) <= set(SPANS)
    Timeline.from_columns(given, source=timeline.source)
    assert sum(part.num_spans for part in timeline.by_rank()) == timeline.num_spans


def _nsight(path: Path) -> None:
    _checked(read_nsight(path, detail="shapes"))


def _execution_trace(path: Path) -> None:
    _checked(timeline_of(read_execution_trace(path)))


def _log(path: Path) -> None:
    _checked(timeline_of_log(read_nccl_log(path)))


def _inspector(path: Path) -> None:
    _checked(read_nccl_inspector(path))


def _tables(rng: random.Random) -> dict[str, list[dict[str, object]]]:
    """Rows of an export, some of their values odd."""
    said = payload("<QQi", 7, 4096, 1)
    tables = usual()
    tables[KERNEL] += [kernel(5, 9, process=8, name=3, deviceId=1)]
    tables[RUNTIME] += [call(1, 2, process=8)]
    tables[NVTX] += [nvtx(1, 3, "ncclAllReduce", binaryData=said), nvtx(4, None, "ncclGroupEnd")]
    for _ in range(rng.randint(0, 6)):
        rows = tables[rng.choice(list(tables))]
        row = rng.choice(rows)
        row[rng.choice(list(row))] = rng.choice(_ODD)
    if rng.random() < 0.2:
        del tables[rng.choice(list(tables))]
    return tables


def _mutated(data: bytes, rng: random.Random) -> bytes:
    found = bytearray(data)
    for _ in range(rng.randint(1, 5)):
        at, how = rng.randrange(len(found) + 1), rng.random()
        if how < 0.35 and at < len(found):
            found[at] = rng.randrange(256)
        elif how < 0.6:
            found[at : at + rng.choice((0, 1, 8))] = rng.choice(_PIECES)
        elif how < 0.75:
            del found[at : at + rng.choice((1, 7, 60, 4096))]
        elif how < 0.9:
            begin = rng.randrange(len(found) + 1)
            found[at:at] = found[begin : begin + rng.choice((4, 40, 600))]
        elif how < 0.95:
            del found[at:]
    return bytes(found)


def _case(rng: random.Random, folder: Path) -> tuple[Callable[[Path], None], Path]:
    which = rng.randrange(5)
    path = folder / "report.bin"
    path.unlink(missing_ok=True)
    texts: list[tuple[Callable[[Path], None], bytes]] = [
        (_execution_trace, json.dumps(rng.choice((OLD, NEW))).encode()),
        (_execution_trace, trace([COMPUTE, REDUCE] * 3)),
        (_log, LOG.encode()),
        (_inspector, "\n".join(json.dumps(_record()) for _ in range(3)).encode()),
    ]
    if which == 4:
        export(path, _tables(rng))
        if rng.random() < 0.7:
            path.write_bytes(_mutated(path.read_bytes(), rng))
        return _nsight, path
    read, data = texts[which]
    path.write_bytes(_mutated(data, rng))
    return read, path


def _record() -> Any:
    return record(event_trace_ts=TIMES)


def fuzz(cases: int, seed: int) -> Result:
    """Run so many cases; anything but an answer or an `InputError` is raised."""
    rng = random.Random(seed)
    answered = damaged = refused = 0
    longest_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(cases):
            read, path = _case(rng, Path(folder))
            begin = time.process_time()
            try:
                read(path)
                answered += 1
            except DamagedFile as damage:
                if isinstance(damage.kept, Timeline):
                    _checked(damage.kept)
                damaged += 1
            except InputError:
                refused += 1
            except BaseException as error:
                error.add_note(f"case {number} of seed {seed}: {read.__name__}")
                raise
            longest_s = max(longest_s, time.process_time() - begin)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Result(answered, damaged, refused, longest_s, peak_mib)


if __name__ == "__main__":
    print(fuzz(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1))
