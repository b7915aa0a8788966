"""Small exports of Nsight Systems, made row by row."""

import sqlite3
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

HOST = 1 << 48
EPOCH_NS = 1_700_000_000_000_000_000
KERNEL, MEMCPY, MEMSET, RUNTIME, SYNC, GRAPH, EVENT = (
    f"CUPTI_ACTIVITY_KIND_{name}"
    for name in (
        "KERNEL", "MEMCPY", "MEMSET", "RUNTIME", "SYNCHRONIZATION", "GRAPH_TRACE", "CUDA_EVENT",
    )
)  # fmt: skip
NVTX = "NVTX_EVENTS"
Row = dict[str, object]
Tables = Mapping[str, Sequence[Mapping[str, object]]]


def pid(number: int) -> int:
    """Nsight's number of a process."""
    return HOST | number << 24


def tid(process: int, thread: int) -> int:
    """Nsight's number of a thread."""
    return pid(process) | thread


def kernel(start: int, end: int, *, name: int = 1, process: int = 7, **more: object) -> Row:
    """Make a kernel on stream 3 of device 0."""
    return {
        "start": start, "end": end, "deviceId": 0, "contextId": 1, "streamId": 3,
        "correlationId": 50, "globalPid": pid(process), "demangledName": name,
        "registersPerThread": 32, "staticSharedMemory": 16, "dynamicSharedMemory": 1024,
        "graphNodeId": None, "gridX": 4, "gridY": 2, "gridZ": 1, "blockX": 128, "blockY": 1,
        "blockZ": 1, **more,
    }  # fmt: skip


def call(start: int, end: int, *, name: int = 2, process: int = 7, flow: int = 50) -> Row:
    """Make a call of CUDA's, by the process' first thread."""
    return {
        "start": start, "end": end, "globalTid": tid(process, process), "nameId": name,
        "correlationId": flow,
    }  # fmt: skip


def nvtx(start: int, end: int | None, text: str | None = None, **more: object) -> Row:
    """Make a range that was pushed and popped."""
    return {
        "start": start, "end": end, "eventType": 59, "text": text, "textId": None,
        "globalTid": tid(7, 7), "domainId": 0, "binaryData": None, **more,
    }  # fmt: skip


def payload(form: str, *values: int) -> bytes:
    """Make a blob as Nsight stores NCCL's payloads."""
    said = struct.pack(form, *values)
    return struct.pack("<IIIIQQ", 1, 0, 16777220, 0, len(said), 32 + len(said)) + said


STRINGS = {
    1: "void gemm<float>(float*)",
    2: "cudaLaunchKernel_v7000",
    3: "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    4: "cuLaunchKernelEx",
    5: "aten::mm, op_id = 12, sizes = [[2, 3], [3, 4]]",
    6: "python3",
    7: "the text of another table",
}


def export(path: Path, tables: Tables, *, strings: Mapping[int, str] | None = None) -> Path:
    """Write an export with these rows; the columns of a table are those of its first row."""
    given = strings or STRINGS
    texts = [{"id": number, "value": text} for number, text in given.items()]
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA synchronous=OFF")
        for name, rows in {"StringIds": texts, **tables}.items():
            columns = list(rows[0])
            listed = ", ".join(f'"{column}"' for column in columns)
            connection.execute(f'CREATE TABLE "{name}" ({listed})')
            marks = ", ".join("?" * len(columns))
            values: Iterable[tuple[object, ...]] = (tuple(row.values()) for row in rows)
            connection.executemany(f'INSERT INTO "{name}" VALUES ({marks})', values)
    connection.close()
    return path


def usual() -> dict[str, list[Row]]:
    """Return the rows of an ordinary export: a launch, its kernel, copies, waits and ranges."""
    return {
        KERNEL: [kernel(200, 260)],
        MEMCPY: [
            {"start": 300, "end": 310, "deviceId": 0, "contextId": 1, "streamId": 3,
             "correlationId": 51, "globalPid": pid(7), "bytes": 4096, "copyKind": 1, "srcKind": 1,
             "dstKind": 2}
        ],
        MEMSET: [
            {"start": 320, "end": 321, "deviceId": 0, "contextId": 1, "streamId": 3,
             "correlationId": 52, "globalPid": pid(7), "value": 0, "bytes": 64, "memKind": 2}
        ],
        RUNTIME: [call(100, 110), call(120, 125, name=4, flow=99)],
        SYNC: [
            {"start": 400, "end": 450, "deviceId": 0, "contextId": 1, "streamId": 3,
             "correlationId": 53, "globalPid": pid(7), "syncType": 2, "eventId": 8,
             "eventSyncId": 77}
        ],
        EVENT: [{"eventSyncId": 77, "streamId": 9, "correlationId": 40}],
        "NVTX_EVENTS": [
            nvtx(90, 130, "aten::mul, seq = 3, op_id = 11"),
            nvtx(80, 500, "ProfilerStep#4"),
            nvtx(95, 98, textId=5),
        ],
        "PROFILER_OVERHEAD": [{"start": 1, "end": 2, "globalTid": tid(7, 7), "nameId": 1}],
        "PROCESSES": [{"globalPid": pid(7), "pid": 7, "name": "train.py"}],
        "ThreadNames": [{"nameId": 6, "globalTid": tid(7, 7)}],
        "TARGET_INFO_GPU": [
            {"id": 3, "name": "NVIDIA H100 80GB HBM3", "totalMemory": 85_000_000_000,
             "smCount": 132, "computeMajor": 9, "computeMinor": 0}
        ],
        "TARGET_INFO_CUDA_DEVICE": [{"gpuId": 3, "cudaId": 0, "pid": 7}],
        "TARGET_INFO_SESSION_START_TIME": [{"utcEpochNs": EPOCH_NS, "systemClockNs": None}],
        "META_DATA_EXPORT": [{"name": "EXPORT_SCHEMA_VERSION", "value": "3.20.2"}],
    }  # fmt: skip
