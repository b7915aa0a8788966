"""Files that once broke a reader or an analysis, each as small as can be."""

import gzip
import json
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import DamagedFile, InputError
from meshwright.observe import notebook
from meshwright.observe.analyze.hang import diagnose
from meshwright.timeline.readers.execution_trace import read_execution_trace
from meshwright.timeline.readers.flight_recorder import read_flight_recorder
from meshwright.timeline.readers.kineto import read_kineto
from meshwright.timeline.readers.traces import read_trace
from tests.timeline.readers.small_chakra import COMPUTE, block, number, trace, varint
from tests.timeline.readers.small_dumps import dump, entry
from tests.timeline.readers.test_nccl_inspector import record

KERNEL = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 5, "dur": 2,
          "args": {"device": 0, "stream": 7, "correlation": 6}}  # fmt: skip


def _kineto(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def _quickly(work: Callable[[], object], limit_s: float = 5.0) -> None:
    began = time.process_time()
    with suppress(InputError):
        work()
    assert time.process_time() - began < limit_s


def test_one_kernel_centuries_later_takes_no_more_memory(tmp_path: Path) -> None:
    late = KERNEL | {"ts": 1712195495519689}
    timeline = read_kineto(_kineto(tmp_path / "t.json", {"traceEvents": [KERNEL, late]}))
    assert len(notebook.launches(timeline)) == 1


@pytest.mark.parametrize("groups", [7, 0.5, "x", {"a": 1}, None])
def test_process_groups_that_are_no_list_are_left_as_they_are(tmp_path: Path, groups: Any) -> None:
    value = {"distributedInfo": {"rank": 1, "pg_config": groups}, "traceEvents": [KERNEL]}
    assert read_kineto(_kineto(tmp_path / "t.json", value)).ranks == (1,)


def test_a_trace_of_counters_alone_has_no_critical_path(tmp_path: Path) -> None:
    value = {"traceEvents": [{"ph": "C", "name": "power", "ts": 5, "args": {"W": 3}}]}
    timeline = read_kineto(_kineto(tmp_path / "t.json", value))
    with pytest.raises(InputError, match="nothing in the timeline"):
        notebook.critical_path(timeline)


@pytest.mark.parametrize(
    "text",
    [
        b'{"x":[' + b'{"traceEvents":[' * 50_000,
        b'{"traceEvents":[{"a":' + b"[" * 2_000_000,
        b'{"traceEvents":[{"a":1' + b" " * (40 << 20),
        b'{"a":1' + b" " * (40 << 20),
    ],
    ids=["openings", "depth", "space in an event", "space before events"],
)
def test_traces_that_never_come_to_an_event_end_soon(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(text, 1))
    with pytest.raises(InputError):
        read_kineto(path)
    _quickly(lambda: read_kineto(path))


def test_a_packed_trace_that_grows_beyond_measure_breaks_off(tmp_path: Path) -> None:
    path = tmp_path / "trace.json.gz"
    event = json.dumps(KERNEL).encode() + b"," + b" " * 100_000
    path.write_bytes(gzip.compress(b'{"traceEvents":[' + event * 800 + b"{}]}", 9))
    with pytest.raises(DamagedFile, match="300 times its size"):
        read_kineto(path)


def test_a_step_of_endless_digits_is_no_step(tmp_path: Path) -> None:
    name = "ProfilerStep#" + "9" * 20
    mark = KERNEL | {"cat": "user_annotation", "name": name, "pid": 1, "tid": 2}
    timeline = read_kineto(_kineto(tmp_path / "t.json", {"traceEvents": [KERNEL, mark]}))
    assert len(notebook.steps(timeline)) == 0


def test_collectives_numbered_far_apart_take_no_more_memory(tmp_path: Path) -> None:
    path = tmp_path / "inspector.log"
    lines = [json.dumps(record(coll_sn=number)) for number in (1, 2**60)]
    path.write_text("\n".join(lines))
    assert notebook.collectives(read_trace(path)) == ()  # one rank alone matches nothing


def test_zeros_are_no_nodes(tmp_path: Path) -> None:
    path = tmp_path / "trace.et"
    path.write_bytes(trace([COMPUTE]) + bytes(1 << 20))
    with pytest.raises(DamagedFile, match="damaged behind node 1"):
        read_execution_trace(path)


def test_more_nodes_than_bytes_can_mean_are_cut_off(tmp_path: Path) -> None:
    tiny = number(1, 7)
    path = tmp_path / "trace.et"
    message = block(1, "0.0.4")
    path.write_bytes(varint(len(message)) + message + (varint(len(tiny)) + tiny) * 100_000)
    with pytest.raises(DamagedFile, match="nodes, which its size cannot mean"):
        read_execution_trace(path)


def _dump(folder: Path, value: Any) -> Path:
    path = folder / "dump_rank_0"
    path.write_bytes(pickle.dumps(value))
    return path


WORLD = str(list(range(50_000)))


def test_a_dump_whose_groups_share_one_long_list_is_refused(tmp_path: Path) -> None:
    config = {str(n): {"name": str(n), "desc": "d", "ranks": WORLD} for n in range(5_000)}
    path = _dump(tmp_path, dump([entry(1)], pg_config=config))
    with pytest.raises(InputError, match="unfolds"):
        read_flight_recorder([path])
    _quickly(lambda: read_flight_recorder([path]))


@pytest.mark.parametrize("kind", ["collectives", "sends"])
def test_many_waits_for_many_ranks_are_judged_in_proportion(tmp_path: Path, kind: str) -> None:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": WORLD}}
    if kind == "collectives":
        entries = [entry(n) for n in range(5_000)]
    else:
        entries = [
            entry(5, is_p2p=True, profiling_name=f"nccl:send 0->{n}", p2p_seq_id=1)
            for n in range(1, 8_000)
        ]
    path = _dump(tmp_path, dump(entries, pg_config=config))
    _quickly(lambda: diagnose(read_flight_recorder([path])))
