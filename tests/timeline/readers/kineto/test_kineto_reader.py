"""Traces as PyTorch's profiler and others write them, and as no writer should."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshwright.errors import DamagedFile, InputError
from meshwright.timeline import Timeline
from meshwright.timeline.readers.chrome_trace import event_chunks
from meshwright.timeline.readers.kineto.kineto_reader import TraceDetail, read_kineto
from meshwright.timeline.readers.kineto.kineto_spans import find_first_occurrences

Event = dict[str, Any]
HOST: Event = {
    "ph": "X",
    "cat": "cpu_op",
    "name": "aten::mm",
    "pid": 7,
    "tid": 8,
    "ts": 1,
    "dur": 2,
}
LAUNCH: Event = {
    **HOST, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 2, "dur": 1,
    "args": {"correlation": 5},
}  # fmt: skip
KERNEL: Event = {
    "ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": 10, "dur": 4,
    "args": {"device": 0, "stream": 7, "correlation": 5, "grid": [1, 2, 3]},
}  # fmt: skip


def written(folder: Path, events: list[Any], name: str = "trace.json", **fields: Any) -> Path:
    path = folder / name
    path.write_text(json.dumps({**fields, "traceEvents": events}))
    return path


def read(folder: Path, events: list[Any], **fields: Any) -> Timeline:
    return read_kineto(written(folder, events, **fields))


def rows(timeline: Timeline) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = timeline.spans.to_pylist()
    return found


def values(timeline: Timeline) -> list[tuple[str, str, int, float]]:
    columns = timeline.counters.to_pydict()
    names = ("name", "unit", "time_ns", "value")
    return list(zip(*(columns[name] for name in names), strict=True))


def test_launch_and_kernel_share_a_flow(tmp_path: Path) -> None:
    _, launch, kernel = rows(read(tmp_path, [HOST, LAUNCH, KERNEL]))
    assert (launch["process"], launch["lane"], launch["flow_out"]) == ("host", "thread 8", 5)
    assert (kernel["process"], kernel["lane"], kernel["flow_in"]) == ("gpu 0", "stream 7", 5)
    assert (kernel["kind"], kernel["category"]) == ("compute", "kernel")


def test_a_launch_that_leads_nowhere_starts_no_flow(tmp_path: Path) -> None:
    (launch,) = rows(read(tmp_path, [LAUNCH]))
    assert launch.get("flow_out") is None


def test_one_graph_launch_starts_the_flow_of_all_its_kernels(tmp_path: Path) -> None:
    timeline = read(tmp_path, [LAUNCH, KERNEL, {**KERNEL, "ts": 20}])
    assert timeline.column("flow_in").tolist() == [-1, 5, 5]


def test_a_stream_among_the_arguments_makes_no_device_work(tmp_path: Path) -> None:
    (launch,) = rows(read(tmp_path, [{**HOST, "name": "triton_poi", "args": {"stream": 7}}]))
    assert (launch["process"], launch["kind"]) == ("host", "host")


def test_times_count_from_the_base(tmp_path: Path) -> None:
    timeline = read(tmp_path, [{**HOST, "ts": 1.5}], baseTimeNanoseconds=1_000_000)
    assert timeline.column("start_ns").tolist() == [1_001_500]


@pytest.mark.parametrize("base", [1_000, "1000", 1e3])
def test_the_base_may_be_a_text(tmp_path: Path, base: Any) -> None:
    (row,) = rows(read(tmp_path, [KERNEL | {"ts": 2}], baseTimeNanoseconds=base))
    assert row["start_ns"] == 3_000


def test_a_second_list_of_events_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    event = json.dumps(KERNEL)
    path.write_text(f'{{"traceEvents": [{event}], "traceName": "a", "traceEvents": [{event}]}}')
    assert read_kineto(path).num_spans == 2


@pytest.mark.parametrize(
    ("text", "expected_ns"),
    [
        ("1712195495519689.047", 1712195495519689047),
        ("1712195495519689", 1712195495519689000),
        ("4458676522690.655", 4458676522690655),
        ("8796093022208.001", 8796093022208001),
        ('"12.5"', 12500),
        ('"12"', 12000),
        ("-3.25", -3250),
        ("1e3", 1000000),
        ("1712195495519689.0474", 1712195495519689047),
        ("0", 0),
    ],
)
def test_times_keep_their_nanoseconds(tmp_path: Path, text: str, expected_ns: int) -> None:
    path = tmp_path / "trace.json"
    path.write_text('{"traceEvents":[{"ph":"X","name":"a","dur":1,"ts":' + text + "}]}")
    assert read_kineto(path).column("start_ns").tolist() == [expected_ns]


def test_negative_durations_count_as_none_and_are_noted(tmp_path: Path) -> None:
    timeline = read(tmp_path, [{**HOST, "dur": -2}, {**HOST, "dur": -1.5}])
    assert timeline.column("duration_ns").tolist() == [0, 0]
    assert "2 negative durations" in timeline.metadata["notes"]


def test_integers_beyond_64_bits_do_no_harm(tmp_path: Path) -> None:
    args = {"Comms Id": 10**30, "correlation": 10**30, "bytes": 2**70}
    timeline = read(tmp_path, [{**KERNEL, "args": args}, {**KERNEL, "pid": 10**30}])
    assert timeline.num_spans == 2


def test_halves_are_joined_by_their_thread(tmp_path: Path) -> None:
    def half(phase: str, name: str, ts: int, tid: int = 1) -> dict[str, Any]:
        return {"ph": phase, "name": name, "ts": ts, "pid": 1, "tid": tid}

    events = [
        half("B", "outer", 0), half("B", "inner", 1), half("B", "elsewhere", 1, tid=2),
        half("E", "", 3), half("E", "", 9, tid=2), half("E", "", 5),
    ]  # fmt: skip
    found = rows(read(tmp_path, events))
    assert [(row["name"], row["start_ns"], row["duration_ns"]) for row in found] == [
        ("outer", 0, 5000), ("inner", 1000, 2000), ("elsewhere", 1000, 8000),
    ]  # fmt: skip


def test_a_start_without_end_lasts_to_the_last_event(tmp_path: Path) -> None:
    events = [{"ph": "E", "ts": 0}, {"ph": "B", "name": "a", "ts": 1, "tid": 3}, {**HOST, "ts": 8}]
    timeline = read(tmp_path, events)
    assert timeline.column("duration_ns").tolist() == [2000, 9000]
    assert "1 spans have no end" in timeline.metadata["notes"]
    assert "1 ends without a start" in timeline.metadata["notes"]


def test_counters_keep_their_series_apart(tmp_path: Path) -> None:
    events = [
        {"ph": "C", "name": "power", "ts": 1, "args": {"W": 300}},
        {"ph": "C", "name": "memory", "ts": 2, "args": {"used": 1, "free": 2.5, "by": "me"}},
    ]
    assert values(read(tmp_path, events)) == [
        ("power", "", 1000, 300.0),
        ("memory: used", "", 2000, 1.0),
        ("memory: free", "", 2000, 2.5),
    ]


def memory(ts: int, **args: int) -> dict[str, Any]:
    named = {key.replace("_", " "): value for key, value in args.items()}
    return {"ph": "i", "name": "[memory]", "ts": ts, "args": named}


def test_memory_instants_become_counters(tmp_path: Path) -> None:
    events = [
        memory(1, Device_Type=1, Device_Id=0, Bytes=8, Total_Allocated=8, Total_Reserved=32),
        memory(2, Device_Type=0, Device_Id=-1, Bytes=4, Total_Allocated=4, Total_Reserved=0),
    ]
    assert values(read(tmp_path, events)) == [
        ("memory allocated gpu 0", "bytes", 1000, 8.0),
        ("memory reserved gpu 0", "bytes", 1000, 32.0),
        ("memory allocated host", "bytes", 2000, 4.0),
    ]


def test_memory_without_totals_is_summed(tmp_path: Path) -> None:
    events = [memory(t, Device_Type=1, Device_Id=0, Bytes=b) for t, b in ((1, 8), (2, -3))]
    name = "memory allocated gpu 0 since start"
    assert values(read(tmp_path, events)) == [
        (name, "bytes", 1000, 8.0),
        (name, "bytes", 2000, 5.0),
    ]


def test_other_instants_are_spans_without_length(tmp_path: Path) -> None:
    events = [
        {"ph": "i", "name": "[OutOfMemory]", "ts": 4, "pid": 1, "tid": 1},
        {"ph": "i", "name": "Record Window End", "ts": 5, "pid": "", "tid": ""},
    ]
    (row,) = rows(read(tmp_path, events))
    assert (row["name"], row["start_ns"], row["duration_ns"]) == ("[OutOfMemory]", 4000, 0)


def test_names_flows_and_unknown_phases_are_no_spans(tmp_path: Path) -> None:
    events = [
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
        {"ph": "s", "id": 1, "ts": 1}, {"ph": "f", "id": 1, "ts": 2}, {"ph": "b", "ts": 1},
        {"ph": "?", "ts": 1}, {"ts": 1}, HOST,
    ]  # fmt: skip
    timeline = read(tmp_path, events)
    assert timeline.num_spans == 1
    assert "1 events of phase 'b' were left out" in timeline.metadata["notes"]
    assert "1 events of phase '?' were left out" in timeline.metadata["notes"]


def test_events_of_odd_form_are_kept_as_far_as_they_go(tmp_path: Path) -> None:
    events = [
        {**HOST, "name": 5, "tid": 1.5, "args": [1]}, {**HOST, "pid": None, "cat": None}, 7, None,
        {**HOST, "ts": "soon"}, {"ph": "X", "name": "timeless"}, HOST,
    ]  # fmt: skip
    timeline = read(tmp_path, events)
    assert [row["name"] for row in rows(timeline)] == ["5", "aten::mm", "aten::mm"]
    assert "2 events without a time" in timeline.metadata["notes"]


def test_old_categories_and_string_threads(tmp_path: Path) -> None:
    events = [
        {**HOST, "cat": "Operator", "tid": "8"}, {**LAUNCH, "cat": "Runtime", "tid": "8"},
        {**KERNEL, "cat": "Kernel", "tid": "stream 7"}, {**KERNEL, "cat": "Memcpy", "ts": 30},
    ]  # fmt: skip
    found = [(row["lane"], row["kind"]) for row in rows(read(tmp_path, events))]
    assert found == [
        ("thread 8", "host"), ("thread 8", "host"), ("stream 7", "compute"),
        ("stream 7", "memory_copy"),
    ]  # fmt: skip


def test_waits_and_copies_of_mtia_are_no_kernels(tmp_path: Path) -> None:
    events = [
        {**KERNEL, "cat": "mtia_ccp_events", "name": name}
        for name in ("event_wait", "dma_request", "pe_exe")
    ]
    found = [row["kind"] for row in rows(read(tmp_path, events))]
    assert found == ["wait", "memory_copy", "compute"]


def test_marks_and_waits_of_a_stream_have_lanes_of_their_own(tmp_path: Path) -> None:
    mark = {**KERNEL, "cat": "gpu_user_annotation", "args": {}}
    sync = {**KERNEL, "cat": "cuda_sync", "name": "Stream Sync"}
    found = [(row["lane"], row["kind"]) for row in rows(read(tmp_path, [KERNEL, mark, sync]))]
    assert found == [("stream 7", "compute"), ("stream 7 marks", "host"), ("stream 7 sync", "wait")]


def test_several_processes_of_the_host_are_told_apart(tmp_path: Path) -> None:
    events = [HOST, {**HOST, "pid": 9}, {**HOST, "cat": "overhead", "pid": -1}]
    found = [row["process"] for row in rows(read(tmp_path, events))]
    assert found == ["host 7", "host 9", "host"]


CALL: Event = {
    **HOST, "name": "record_param_comms", "ts": 0, "dur": 9,
    "args": {
        "Collective name": "_allgather_base", "In msg nelems": 3, "Out msg nelems": 24,
        "dtype": "BFloat16", "Process Group Name": "0",
    },
}  # fmt: skip
NCCL: Event = {
    **KERNEL,
    "name": "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
}


def test_a_kernel_without_arguments_learns_them_from_the_call_around_its_launch(
    tmp_path: Path,
) -> None:
    ended = {**CALL, "ts": 1, "dur": 0.5, "args": {**CALL["args"], "Process Group Name": "1"}}
    other = {**CALL, "tid": 99, "args": {**CALL["args"], "Process Group Name": "2"}}
    kernel = rows(read(tmp_path, [CALL, ended, other, LAUNCH, NCCL]))[-1]
    assert (kernel["kind"], kernel["collective"]) == ("communication", "all_gather")
    assert (kernel["bytes"], kernel["group"], kernel["dtype"]) == (48, "0", "bf16")


def test_a_kernel_outside_of_any_call_is_known_by_its_name(tmp_path: Path) -> None:
    name = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    later = {**CALL, "ts": 5}
    kernel = rows(read(tmp_path, [later, LAUNCH, {**NCCL, "name": name}]))[-1]
    assert (kernel["collective"], kernel["dtype"], kernel["bytes"]) == (
        "reduce_scatter",
        "bf16",
        None,
    )


def test_a_kernels_own_arguments_come_first(tmp_path: Path) -> None:
    own = {**KERNEL["args"], **CALL["args"], "In msg nelems": 80}
    kernel = rows(read(tmp_path, [CALL, LAUNCH, {**NCCL, "args": own}]))[-1]
    assert kernel["bytes"] == 160


@pytest.mark.parametrize(
    ("detail", "kept"),
    [
        (TraceDetail.LEAN, [False, False, False]),
        (TraceDetail.STANDARD, [False, False, True, False]),
        (TraceDetail.SHAPES, [True, False, True, False]),
        (TraceDetail.FULL, [True, True, True, True]),
    ],
)
def test_detail_says_whose_arguments_are_kept(
    tmp_path: Path, detail: TraceDetail, kept: list[bool]
) -> None:
    operator = {**HOST, "args": {"Input Dims": [[2, 3]]}}
    python = {**HOST, "cat": "python_function", "args": {"Python id": 1}}
    path = written(tmp_path, [operator, LAUNCH, KERNEL, python])
    found = rows(read_kineto(path, detail=detail))
    assert [row.get("extra") is not None for row in found] == kept
    if detail is TraceDetail.FULL:
        assert json.loads(found[0]["extra"]) == operator["args"]


@pytest.mark.parametrize(
    ("info", "name_and_given", "expected", "note"),
    [
        ({"rank": 3}, ("rank-5.json", 9), 3, ""),
        ({"rank": "3"}, ("a.json", None), 3, ""),
        ({"backend": "nccl"}, ("worker-rank_5.json", 9), 5, "file's name"),
        ({"rank": -1}, ("x.r12.json", None), 12, "file's name"),
        ({}, ("a.json", 9), 9, "place in the folder"),
        ({}, ("a.json", None), 0, "the trace has no rank; rank 0 assumed"),
    ],
)
def test_the_rank_is_said_or_named_or_given(
    tmp_path: Path,
    info: dict[str, Any],
    name_and_given: tuple[str, int | None],
    expected: int,
    note: str,
) -> None:
    name, given = name_and_given
    timeline = read_kineto(written(tmp_path, [HOST], name=name, distributedInfo=info), rank=given)
    assert timeline.ranks == (expected,)
    assert note in timeline.metadata.get("notes", "")


def test_ranks_of_groups_are_lists_however_they_were_written(tmp_path: Path) -> None:
    info = {"rank": 0, "pg_config": [{"pg_name": "0", "ranks": "[0, 1]"}, {"ranks": [2]}]}
    timeline = read(tmp_path, [HOST], distributedInfo=info)
    groups = json.loads(timeline.metadata["distributed"])["pg_config"]
    assert [group["ranks"] for group in groups] == [[0, 1], [2]]


def test_top_level_values_of_odd_form_are_noted(tmp_path: Path) -> None:
    timeline = read(tmp_path, [HOST], distributedInfo=[1], baseTimeNanoseconds="x")
    assert "distributedInfo has an unknown form" in timeline.metadata["notes"]
    assert "baseTimeNanoseconds x is no time" in timeline.metadata["notes"]


LAYOUTS = {
    "compact": lambda document: json.dumps(document, separators=(",", ":")),
    "indented": lambda document: json.dumps(document, indent=4),
    "events last": lambda document: json.dumps(dict(reversed(document.items()))),
    "tabs": lambda document: json.dumps(document, indent="\t", separators=(" ,", " :\r\n")),
    "bare list": lambda document: json.dumps(document["traceEvents"]),
    "byte order mark": lambda document: "\ufeff" + json.dumps(document),
    "one per line": lambda document: "[\n" + "\n".join(map(json.dumps, document["traceEvents"])),
    "open list": lambda document: (
        "[" + ",\n".join(map(json.dumps, document["traceEvents"])) + ",\n"
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("buffer_bytes", [64, 500, 1 << 20])
def test_any_layout_of_the_text_says_the_same(
    tmp_path: Path, layout: str, buffer_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tricky: Event = {
        "a": [{"b": 1}, {"c": '},\n  {"ph": "X"'}],
        "d": '"traceEvents": [',
        "e": '\\"]}',
    }
    events = [
        {**KERNEL, "ts": number, "name": f"k{number}", "args": {**tricky, "correlation": number}}
        for number in range(40)
    ]
    document = {
        "note": '"traceEvents": [', "nested": {"traceEvents": [{"ph": "X", "ts": 1}]},
        "traceEvents": events, "more": [{"ph": "X"}, {"ph": "X"}],
    }  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(LAYOUTS[layout](document))
    monkeypatch.setattr(
        "meshwright.timeline.readers.kineto.kineto_reader.BUFFER_BYTES", buffer_bytes
    )
    found = rows(read_kineto(path))
    assert [row["name"] for row in found] == [f"k{number}" for number in range(40)]
    assert [row["flow_in"] for row in found] == list(range(40))
    assert json.loads(found[7]["extra"])["a"][1]["c"] == tricky["a"][1]["c"]


def test_an_event_larger_than_the_buffer(tmp_path: Path) -> None:
    large = {**KERNEL, "args": {"text": "x" * 3 * event_chunks.BUFFER_BYTES}}
    assert read(tmp_path, [HOST, large, HOST]).num_spans == 3


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_that_breaks_off_keeps_all_complete_events(tmp_path: Path, packed: bool) -> None:
    text = json.dumps({"traceEvents": [{**KERNEL, "ts": n} for n in range(5000)]}).encode()
    whole = gzip.compress(text, 1) if packed else text
    path = tmp_path / "trace.json"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DamagedFile) as caught:
        read_kineto(path)
    kept = caught.value.readable
    assert isinstance(kept, Timeline)
    assert 1000 < kept.num_spans < 5000
    assert kept.column("start_ns").tolist() == [n * 1000 for n in range(kept.num_spans)]


@pytest.mark.parametrize("cut", range(30, 300, 7))
def test_wherever_a_trace_breaks_off_what_is_before_is_kept(tmp_path: Path, cut: int) -> None:
    text = json.dumps({"traceEvents": [{**KERNEL, "ts": n} for n in range(9)]})
    path = tmp_path / "trace.json"
    path.write_text(text[:cut])
    with pytest.raises(DamagedFile) as caught:
        read_kineto(path)
    assert isinstance(caught.value.readable, Timeline)
    assert caught.value.readable.num_spans == text[:cut].count("}}")


def test_a_broken_event_keeps_those_before_it(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    good = json.dumps(HOST)
    path.write_text(f'{{"traceEvents":[{good},{good},{{"ph":"X" "ts":1}},{good}]}}')
    with pytest.raises(DamagedFile, match="broken event") as caught:
        read_kineto(path)
    assert isinstance(caught.value.readable, Timeline)
    assert caught.value.readable.num_spans == 2


def test_bytes_that_are_no_text_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    kernel = json.dumps({**KERNEL, "name": "@", "args": {"x": "@"}}).encode()
    path.write_bytes(b'{"traceEvents":[' + kernel.replace(b"@", b"k\xff\xfe") + b"]}")
    (row,) = rows(read_kineto(path))
    assert row["name"] == "k\ufffd\ufffd"
    assert json.loads(row["extra"]) == {"x": "k\ufffd\ufffd"}


@pytest.mark.parametrize(
    "text", ["nan", "-nan", "inf", "NaN", "Infinity", r'"\ud800"', '"a\nb"', r'"C:\Users"']
)
def test_what_is_almost_json_is_read(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace.json"
    event = json.dumps({**KERNEL, "args": {"correlation": 5, "x": "@"}}).replace('"@"', text)
    path.write_text('{"traceEvents":[' + ",".join([event] * 3) + "]}")
    timeline = read_kineto(path)
    assert timeline.column("flow_in").tolist() == [5, 5, 5]
    assert isinstance(json.loads(rows(timeline)[0]["extra"]), dict)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "is empty"),
        (b"  \n", "is empty"),
        (b"rank 0 started", "is no JSON"),
        (b'{"schema": "1.0", "nodes": []}', "has schema, nodes"),
        (b"{}", "has nothing"),
        (b'{"traceEvents": 5}', "has traceEvents"),
        (b'{"a": ', "no complete JSON"),
        (b"\x1f\x8b garbage", "compressed data is damaged"),
    ],
)
def test_what_is_no_trace_is_refused_by_name(tmp_path: Path, content: bytes, fault: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=fault) as caught:
        read_kineto(path)
    assert str(path) in str(caught.value)


def test_a_trace_without_events_is_an_empty_timeline(tmp_path: Path) -> None:
    assert read(tmp_path, []).num_spans == 0


def test_columns_without_flows_have_no_first_of_each() -> None:
    assert find_first_occurrences(np.empty(0, dtype=np.int64)).tolist() == []
    assert find_first_occurrences(np.array([7, 3, 7])).tolist() == [0, 1]
