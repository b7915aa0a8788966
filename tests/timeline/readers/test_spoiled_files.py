"""Files that once broke a reader or an analysis, each as small as can be."""

import gzip
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import DamagedFile, InputError
from meshwright.observe import notebook
from meshwright.observe.analyze.hang import diagnose_hang
from meshwright.timeline.readers.execution_trace.execution_trace_reader import read_execution_trace
from meshwright.timeline.readers.flight_recorder.flight_recorder_reader import read_flight_recorder
from meshwright.timeline.readers.kineto.kineto_reader import read_kineto
from meshwright.timeline.readers.trace_folder import read_trace
from tests.counted import instructions
from tests.timeline.readers.nccl_inspector.test_inspector_reader import record
from tests.timeline.readers.small_chakra import COMPUTE, block, number, trace, varint
from tests.timeline.readers.small_dumps import dump, entry

KERNEL = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 5, "dur": 2,
          "args": {"device": 0, "stream": 7, "correlation": 6}}  # fmt: skip


def _kineto(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


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
    ("text", "most"),
    [
        (b'{"x":[' + b'{"traceEvents":[' * 50_000, 40_000),
        (b'{"traceEvents":[{"a":' + b"[" * 2_000_000, 2_000_000),  # counted to 10,000 brackets
        (b'{"traceEvents":[{"a":1' + b" " * (40 << 20), 40_000),
        (b'{"a":1' + b" " * (40 << 20), 40_000),
    ],
    ids=["openings", "depth", "space in an event", "space before events"],
)
def test_traces_that_never_come_to_an_event_end_soon(
    tmp_path: Path, text: bytes, most: int
) -> None:
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(text, 1))

    def refuse() -> None:
        with pytest.raises(InputError):
            read_kineto(path)

    refuse()  # what is loaded when it is first needed is loaded now
    assert instructions(refuse) < most


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


def test_a_dump_whose_groups_share_one_long_list_is_refused(tmp_path: Path) -> None:
    def refused(groups: int) -> int:
        world = str(list(range(10 * groups)))
        config = {str(n): {"name": str(n), "desc": "d", "ranks": world} for n in range(groups)}
        path = _dump(tmp_path, dump([entry(1)], pg_config=config))

        def refuse() -> None:
            with pytest.raises(InputError, match="unfolds"):
                read_flight_recorder([path])

        refuse()
        return instructions(refuse)

    assert refused(2_000) < 2.5 * refused(1_000)  # rank by rank it would be four times


@pytest.mark.parametrize("kind", ["collectives", "sends"])
def test_many_waits_for_many_ranks_are_judged_in_proportion(tmp_path: Path, kind: str) -> None:
    def judged(ranks: int) -> int:
        config = {"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(ranks)))}}
        if kind == "collectives":
            entries = [entry(n) for n in range(ranks // 2)]
        else:
            entries = [
                entry(5, is_p2p=True, profiling_name=f"nccl:send 0->{n}", p2p_seq_id=1)
                for n in range(1, ranks // 2)
            ]
        path = _dump(tmp_path, dump(entries, pg_config=config))
        diagnose_hang(read_flight_recorder([path]))
        return instructions(lambda: diagnose_hang(read_flight_recorder([path])))

    assert judged(2_000) < 2.5 * judged(
        1_000
    )  # each wait against each rank, it would be four times
