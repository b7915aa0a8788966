"""Exports of Nsight Systems as timelines."""

import gzip
import json
import sqlite3
from pathlib import Path
from typing import Any, cast

import pytest

from meshwright.errors import DamagedFile, InputError
from meshwright.timeline import Timeline
from meshwright.timeline.readers.nsys.nsys_database import NsysDatabase
from meshwright.timeline.readers.nsys.nsys_reader import read_nsys
from meshwright.timeline.readers.trace_folder import read_trace
from tests.timeline.readers.small_nsight import (
    EPOCH_NS,
    EVENT,
    GRAPH,
    KERNEL,
    RUNTIME,
    STRINGS,
    SYNC,
    call,
    export,
    kernel,
    nvtx,
    payload,
    pid,
    tid,
    usual,
)

Row = dict[str, Any]


def rows(timeline: Timeline, name: str) -> list[Row]:
    found = cast(list[Row], timeline.spans.to_pylist())
    return [item for item in found if item["name"] == name]


def row(timeline: Timeline, name: str) -> Row:
    (found,) = rows(timeline, name)
    return found


@pytest.fixture
def ordinary(tmp_path: Path) -> Timeline:
    return read_nsys(export(tmp_path / "report.sqlite", usual()), detail="shapes")


def test_a_kernel_lies_on_its_stream_with_its_arguments(ordinary: Timeline) -> None:
    found = rows(ordinary, "void gemm<float>(float*)")[0]
    assert (found["process"], found["lane"], found["kind"]) == ("gpu 0", "stream 3", "compute")
    assert (found["start_ns"] - EPOCH_NS, found["duration_ns"]) == (200, 60)
    said = json.loads(found["extra"])
    assert (said["grid"], said["block"], said["shared memory"]) == ([4, 2, 1], [128, 1, 1], 1040)
    assert (said["registers per thread"], said["correlation"]) == (32, 50)


def test_a_launch_leads_to_its_kernel_and_others_nowhere(ordinary: Timeline) -> None:
    launch = row(ordinary, "cudaLaunchKernel")
    assert launch["flow_out"] == rows(ordinary, "void gemm<float>(float*)")[0]["flow_in"] == 50
    assert (launch["process"], launch["lane"]) == ("host", "thread 7")
    other = row(ordinary, "cuLaunchKernelEx")
    assert (other["flow_out"], other["category"]) == (None, "cuda_driver")


def test_copies_and_fills_are_named_as_pytorch_names_them(ordinary: Timeline) -> None:
    copy = row(ordinary, "Memcpy HtoD (Pinned -> Device)")
    assert (copy["kind"], copy["bytes"], copy["category"]) == ("memory_copy", 4096, "gpu_memcpy")
    assert row(ordinary, "Memset (Device)")["bytes"] == 64


def test_a_wait_names_the_event_and_who_recorded_it(ordinary: Timeline) -> None:
    wait = row(ordinary, "Stream Wait Event")
    assert (wait["kind"], wait["lane"], wait["category"]) == ("wait", "stream 3 sync", "cuda_sync")
    said = json.loads(wait["extra"])
    assert (said["wait_on_stream"], said["wait_on_cuda_event_record_corr_id"]) == (9, 40)
    assert said["cuda_sync_kind"] == "Stream Wait Event"


def test_operators_lose_what_emit_nvtx_adds_to_their_names(ordinary: Timeline) -> None:
    assert row(ordinary, "aten::mul")["category"] == "cpu_op"
    assert json.loads(row(ordinary, "aten::mul")["extra"]) == {"Sequence number": 3, "op_id": 11}
    stored = row(ordinary, "aten::mm")
    assert json.loads(stored["extra"])["Input Dims"] == [[2, 3], [3, 4]]
    assert row(ordinary, "ProfilerStep#4")["category"] == "user_annotation"


def test_arguments_of_operators_are_left_out_by_default(tmp_path: Path) -> None:
    timeline = read_nsys(export(tmp_path / "report.sqlite", usual()))
    assert row(timeline, "aten::mm")["extra"] is None


def test_metadata_says_devices_processes_threads_and_schema(ordinary: Timeline) -> None:
    said = {key: json.loads(ordinary.metadata[key]) for key in ("devices", "processes", "threads")}
    assert said["devices"] == [
        {"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85_000_000_000, "numSms": 132,
         "computeMajor": 9, "computeMinor": 0}
    ]  # fmt: skip
    assert said["processes"] == [{"rank": 0, "pid": 7, "name": "train.py", "devices": [0]}]
    assert said["threads"] == {"0": {"thread 7": "python3"}}
    assert json.loads(ordinary.metadata["settings"]) == {"schema": "3.20.2"}


def test_times_on_the_systems_clock_become_those_of_the_wall_clock(tmp_path: Path) -> None:
    tables = usual() | {
        "TARGET_INFO_SESSION_START_TIME": [{"utcEpochNs": EPOCH_NS, "systemClockNs": 1}]
    }
    timeline = read_nsys(export(tmp_path / "report.sqlite", tables))
    assert rows(timeline, "void gemm<float>(float*)")[0]["start_ns"] == EPOCH_NS + 199


def test_without_a_start_of_the_session_times_stay_and_a_note_says_so(tmp_path: Path) -> None:
    tables = usual()
    del tables["TARGET_INFO_SESSION_START_TIME"]
    timeline = read_nsys(export(tmp_path / "report.sqlite", tables))
    assert rows(timeline, "void gemm<float>(float*)")[0]["start_ns"] == 200
    assert "no start of the session" in timeline.metadata["notes"]


def test_each_process_that_uses_a_gpu_is_a_rank_in_the_order_of_devices(tmp_path: Path) -> None:
    tables = {
        KERNEL: [kernel(200, 260, deviceId=1), kernel(201, 261, process=8)],
        RUNTIME: [call(100, 110), call(101, 111, process=8)],
        "NVTX_EVENTS": [nvtx(1, 2, "loader", globalTid=tid(99, 99))],
    }
    timeline = read_nsys(export(tmp_path / "report.sqlite", tables))
    processes = json.loads(timeline.metadata["processes"])
    assert [(item["rank"], item["pid"]) for item in processes] == [(0, 8), (1, 7)]
    assert "1 spans of 1 processes without a GPU were left out" in timeline.metadata["notes"]


def test_flows_of_two_processes_do_not_meet(tmp_path: Path) -> None:
    tables = {
        KERNEL: [kernel(200, 260), kernel(201, 261, process=8, deviceId=1)],
        RUNTIME: [call(100, 110), call(101, 111, process=8)],
    }
    timeline = read_nsys(export(tmp_path / "report.sqlite", tables))
    for part in timeline.split_by_rank():
        out, into = part.column("flow_out"), part.column("flow_in")
        assert set(out[out >= 0]) == set(into[into >= 0])
    assert len({item["flow_in"] for item in rows(timeline, STRINGS[1])}) == 2


def test_the_rank_of_one_process_is_from_the_files_name_or_the_caller(tmp_path: Path) -> None:
    tables = {KERNEL: [kernel(1, 2)]}
    assert read_nsys(export(tmp_path / "report_rank5.sqlite", tables)).ranks == (5,)
    assert read_nsys(export(tmp_path / "report.sqlite", tables), rank=3).ranks == (3,)


def test_two_files_without_ranks_follow_each_other(tmp_path: Path) -> None:
    for name in ("node1", "node2"):
        tables = {KERNEL: [kernel(1, 2), kernel(1, 3, process=8, deviceId=1)]}
        export(tmp_path / f"{name}.sqlite", tables)
    assert read_trace(tmp_path).ranks == (0, 1, 2, 3)


NCCL = {**STRINGS, 20: "ncclCommInitRankConfig", 21: "ncclAllReduce", 22: "ncclGroupStart",
        23: "ncclSend", 24: "ncclRecv", 25: "ncclGroupEnd", 26: "ncclAllGather"}  # fmt: skip
INIT = payload("<Qiii", 0xABC, 8, 6, 0)


def test_nccls_payload_tells_the_rank(tmp_path: Path) -> None:
    tables = {
        KERNEL: [kernel(200, 260, name=3)],
        "NVTX_EVENTS": [nvtx(1, 2, textId=20, binaryData=INIT)],
    }
    timeline = read_nsys(export(tmp_path / "report.sqlite", tables, strings=NCCL))
    assert timeline.ranks == (6,)
    assert "from NCCL" in timeline.metadata["notes"]


def test_a_kernel_gets_the_bytes_of_the_call_that_launched_it(tmp_path: Path) -> None:
    reduced = payload("<QQi", 0xABC, 4096, 0)
    tables = {
        KERNEL: [kernel(200, 260, name=3)],
        RUNTIME: [call(100, 110)],
        "NVTX_EVENTS": [nvtx(90, 120, textId=21, binaryData=reduced)],
    }
    timeline = read_nsys(export(tmp_path / "report.sqlite", tables, strings=NCCL))
    found = row(timeline, STRINGS[3])
    assert (found["kind"], found["collective"], found["bytes"], found["group"], found["dtype"]) == (
        "communication", "all_reduce", 4096, "0xabc", "bf16",
    )  # fmt: skip
    assert row(timeline, "ncclAllReduce")["category"] == "nccl"


def test_the_buffer_of_all_gather_is_whole_where_the_communicator_is_known(tmp_path: Path) -> None:
    gathered = payload("<QQ", 0xABC, 100)
    alone = payload("<QQ", 0xDEF, 100)
    ranges = [
        nvtx(1, 2, textId=20, binaryData=INIT),
        nvtx(3, 4, textId=26, binaryData=gathered),
        nvtx(5, 6, textId=26, binaryData=alone),
    ]
    tables = {KERNEL: [kernel(200, 260)], "NVTX_EVENTS": ranges}
    timeline = read_nsys(export(tmp_path / "report.sqlite", tables, strings=NCCL))
    assert [item["bytes"] for item in rows(timeline, "ncclAllGather")] == [800, None]


def test_grouped_sends_are_one_kernels(tmp_path: Path) -> None:
    sent = payload("<QQi", 0xABC, 70, 1)
    ranges = [
        nvtx(10, 11, textId=22),
        *(nvtx(12 + n, 13 + n, textId=23, binaryData=sent) for n in range(3)),
        nvtx(20, 21, textId=24, binaryData=sent),
        nvtx(30, 60, textId=25),
        nvtx(70, 71, textId=23, binaryData=sent),
    ]
    names = {**NCCL, 3: "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"}
    tables = {
        KERNEL: [kernel(200, 260, name=3)],
        RUNTIME: [call(40, 50)],
        "NVTX_EVENTS": ranges,
    }
    timeline = read_nsys(export(tmp_path / "report.sqlite", tables, strings=names))
    found = row(timeline, names[3])
    assert (found["collective"], found["bytes"], found["group"]) == ("send_recv", 210, "0xabc")


def test_a_range_without_an_end_lasts_to_the_last_event(tmp_path: Path) -> None:
    tables = usual() | {"NVTX_EVENTS": [nvtx(90, None, "loop")]}
    timeline = read_nsys(export(tmp_path / "report.sqlite", tables))
    assert row(timeline, "loop")["duration_ns"] == 450 - 90
    assert "1 spans have no end" in timeline.metadata["notes"]


def test_marks_are_moments_and_other_events_are_left_out(tmp_path: Path) -> None:
    ranges = [nvtx(5, None, "here", eventType=34), nvtx(6, None, "NCCL", eventType=75)]
    timeline = read_nsys(export(tmp_path / "report.sqlite", usual() | {"NVTX_EVENTS": ranges}))
    assert row(timeline, "here")["duration_ns"] == 0
    assert not rows(timeline, "NCCL")


def test_ranges_that_may_cross_have_a_lane_of_their_own(tmp_path: Path) -> None:
    tables = usual() | {"NVTX_EVENTS": [nvtx(5, 7, "a"), nvtx(6, 9, "b", eventType=60)]}
    timeline = read_nsys(export(tmp_path / "report.sqlite", tables))
    assert (row(timeline, "a")["lane"], row(timeline, "b")["lane"]) == (
        "thread 7", "thread 7 ranges",
    )  # fmt: skip


def test_whole_graphs_are_device_work_and_a_note_says_what_is_missing(tmp_path: Path) -> None:
    graph = {"start": 5, "end": 9, "deviceId": 0, "contextId": 1, "streamId": 3,
             "correlationId": 50, "globalPid": pid(7), "graphId": 12}  # fmt: skip
    tables: dict[str, list[Row]] = {GRAPH: [graph], RUNTIME: [call(1, 2)]}
    timeline = read_nsys(export(tmp_path / "report.sqlite", tables))
    assert row(timeline, "CUDA graph 12")["kind"] == "compute"
    assert "--cuda-graph-trace=node" in timeline.metadata["notes"]


def test_waits_are_on_the_one_device_of_their_process(tmp_path: Path) -> None:
    tables = usual() | {KERNEL: [kernel(200, 260, deviceId=2)]}
    del tables["CUPTI_ACTIVITY_KIND_MEMCPY"], tables["CUPTI_ACTIVITY_KIND_MEMSET"]
    timeline = read_nsys(export(tmp_path / "report.sqlite", tables))
    assert row(timeline, "Stream Wait Event")["process"] == "gpu 2"


def test_an_older_schema_without_many_columns_is_read(tmp_path: Path) -> None:
    old = {"start": 200, "end": 260, "deviceId": 0, "streamId": 3, "correlationId": 50,
           "shortName": 1}  # fmt: skip
    tables: dict[str, Any] = {
        KERNEL: [old],
        RUNTIME: [call(100, 110)],
        "EXPORT_META_DATA": [{"name": "EXPORT_SCHEMA_VERSION", "value": "2.4.0"}],
    }
    timeline = read_nsys(export(tmp_path / "report.sqlite", tables))
    assert row(timeline, STRINGS[1])["flow_in"] == row(timeline, "cudaLaunchKernel")["flow_out"]
    assert json.loads(timeline.metadata["settings"]) == {"schema": "2.4.0"}


def test_names_that_stand_in_the_rows_themselves_are_read(tmp_path: Path) -> None:
    tables: dict[str, Any] = {
        KERNEL: [kernel(200, 260) | {"demangledName": "void gemm<float>()"}],
        RUNTIME: [call(100, 110) | {"nameId": "cudaLaunchKernel_v7000"}],
    }
    timeline = read_nsys(export(tmp_path / "report.sqlite", tables))
    assert row(timeline, "void gemm<float>()")["flow_in"] == 50
    assert row(timeline, "cudaLaunchKernel")["flow_out"] == 50


def test_a_kernel_without_its_long_name_has_its_short_one(tmp_path: Path) -> None:
    tables: dict[str, Any] = {KERNEL: [kernel(2, 6) | {"demangledName": None, "shortName": 1}]}
    timeline = read_nsys(export(tmp_path / "report.sqlite", tables))
    assert row(timeline, STRINGS[1])["kind"] == "compute"


def test_ranges_of_texts_are_ranges(tmp_path: Path) -> None:
    ranges = [nvtx(5, 7, "a", eventType=70), nvtx(6, 9, "b", eventType=71)]
    timeline = read_nsys(export(tmp_path / "report.sqlite", usual() | {"NVTX_EVENTS": ranges}))
    assert [row(timeline, name)["duration_ns"] for name in "ab"] == [2, 3]


def test_ranges_without_domains_or_ids_are_read(tmp_path: Path) -> None:
    bare = {"start": 5, "end": 9, "eventType": 59, "text": "step", "globalTid": tid(7, 7)}
    timeline = read_nsys(export(tmp_path / "report.sqlite", usual() | {"NVTX_EVENTS": [bare]}))
    assert row(timeline, "step")["duration_ns"] == 4


def test_a_packed_export_that_grows_beyond_measure_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.sqlite.gz"
    path.write_bytes(gzip.compress(b"SQLite format 3\0" + bytes(80 << 20)))
    with pytest.raises(InputError, match="300 times its size"):
        read_nsys(path)


def test_a_packed_export_gives_the_same_timeline(tmp_path: Path) -> None:
    plain = export(tmp_path / "report.sqlite", usual())
    packed = tmp_path / "report.sqlite.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_nsys(packed).equals(read_nsys(plain))


def test_the_environment_and_texts_of_other_tables_are_never_read(tmp_path: Path) -> None:
    secret = [{"name": "Environment", "value": "TOKEN=hunter2"}]
    tables = usual() | {"META_DATA_CAPTURE": secret, "TARGET_INFO_SYSTEM_ENV": secret}
    path = export(tmp_path / "report.sqlite", tables)
    timeline = read_nsys(path, detail="full")
    said = str(timeline.spans.to_pydict()) + str(timeline.metadata)
    assert "hunter2" not in said
    assert STRINGS[7] not in said
    with NsysDatabase(path) as database:
        assert not list(database.iter_chunks("TARGET_INFO_SYSTEM_ENV", '"value"'))
        with pytest.raises(sqlite3.DatabaseError, match=r"prohibited|not authorized"):
            list(database.iter_chunks(KERNEL, "(SELECT value FROM TARGET_INFO_SYSTEM_ENV)"))


@pytest.mark.parametrize(
    "trap",
    [
        f"CREATE VIEW {RUNTIME} AS SELECT load_extension('evil') AS start",
        f"CREATE VIRTUAL TABLE {RUNTIME} USING fts5(start)",
        f"CREATE TABLE {RUNTIME} (x, start AS (hex(zeroblob(9999999))))",
    ],
)
def test_nothing_that_the_file_would_run_is_run(tmp_path: Path, trap: str) -> None:
    path = export(tmp_path / "report.sqlite", {KERNEL: [kernel(1, 2)]})
    with sqlite3.connect(path) as connection:
        connection.execute(trap)
    connection.close()
    timeline = read_nsys(path)
    assert timeline.num_spans == 1


def test_a_file_with_more_rows_than_bytes_is_refused(tmp_path: Path) -> None:
    path = export(tmp_path / "report.sqlite", usual())
    with NsysDatabase(path) as database:
        database.rows_left = 0
        with pytest.raises(sqlite3.DatabaseError, match="more rows"):
            list(database.iter_chunks(KERNEL, '"start"'))


def test_a_truncated_export_keeps_what_can_be_read(tmp_path: Path) -> None:
    tables = usual() | {RUNTIME: [call(n, n + 1) for n in range(20_000)]}
    data = export(tmp_path / "whole.sqlite", tables).read_bytes()
    path = tmp_path / "report.sqlite"
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(DamagedFile) as caught:
        read_nsys(path)
    assert cast(Timeline, caught.value.readable).num_spans > 1000


def test_other_files_are_refused_with_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "x.sqlite"
    path.write_bytes(b"no database")
    with pytest.raises(InputError, match="no SQLite database"):
        read_nsys(path)
    with pytest.raises(InputError, match="cannot read"):
        read_nsys(tmp_path / "missing.sqlite")
    for name, what in (("rocpd_kernel", "rocprofv3"), ("cats", "no export of Nsight")):
        other = tmp_path / f"{name}.sqlite"
        with sqlite3.connect(other) as connection:
            connection.execute(f"CREATE TABLE {name} (x)")
        connection.close()
        with pytest.raises(InputError, match=what):
            read_nsys(other)


@pytest.mark.real
@pytest.mark.parametrize("which", ["before", "after"])
def test_a_real_export_has_all_rows_of_its_tables(shared: Path, tmp_path: Path, which: str) -> None:
    packed = shared / "traces" / "nsys-sqlite" / f"mfu_2gpu_{which}.sqlite.gz"
    plain = tmp_path / "report.sqlite"
    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    timeline = read_nsys(packed)
    category = timeline.string_column("category")
    counts = {
        name: int((category.codes == code).sum()) for code, name in enumerate(category.values)
    }
    with sqlite3.connect(plain) as connection:

        def count(table: str) -> int:
            return int(connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0])

        assert counts["kernel"] == count(KERNEL)
        assert counts["cuda_sync"] == count(SYNC)
        assert counts["cuda_runtime"] + counts["cuda_driver"] == count(RUNTIME)
        ranges = counts["cpu_op"] + counts["user_annotation"] + counts["nccl"]
        assert ranges == count("NVTX_EVENTS")
        query = f'SELECT globalPid, sum("end" - start) FROM {KERNEL} GROUP BY 1 ORDER BY 1'
        busy = [total for _, total in connection.execute(query)]
    connection.close()
    assert timeline.ranks == (0, 1)
    for part, total in zip(timeline.split_by_rank(), busy, strict=True):
        own = part.string_column("category")
        kernels = own.codes == list(own.values).index("kernel")
        assert part.column("duration_ns")[kernels].sum() == total
        out, into = part.column("flow_out"), part.column("flow_in")
        assert set(out[out >= 0]) <= set(into[into >= 0])
    assert EVENT not in str(timeline.metadata)
