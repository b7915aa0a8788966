"""Tiny timelines of one rank, written as lists of spans: what a profiler would have recorded."""

from typing import Any

from meshwright.timeline.timeline import Timeline

Row = dict[str, Any]

GPU = {"process": "gpu 0", "lane": "stream 7"}
HOST = {"process": "host", "lane": "thread 1"}


def timeline(*rows: Row, rank: int = 0, metadata: dict[str, str] | None = None) -> Timeline:
    """A measured timeline of these spans."""
    defaults: Row = {
        "process": "host", "lane": "thread 1", "kind": "host", "flow_in": -1, "flow_out": -1,
        "bytes": -1, "collective": None, "category": None, "extra": None,
    }  # fmt: skip
    names = [*defaults, "start_ns", "duration_ns", "name"]
    columns = {name: [{**defaults, **row}[name] for row in rows] for name in names}
    return Timeline.from_columns({"rank": rank, **columns}, source="measured", metadata=metadata)


def kernel(start: int, end: int, name: str = "gemm", **more: Any) -> Row:
    """A compute kernel on stream 7."""
    return _span(start, end, name, {**GPU, "kind": "compute", "category": "kernel", **more})


def collective(start: int, end: int, name: str = "ncclDevKernel_AllReduce", **more: Any) -> Row:
    """A collective on a stream of its own."""
    place = {"process": "gpu 0", "lane": "stream 20"}
    return _span(start, end, name, {**place, "kind": "communication", "category": "kernel", **more})


def copy(start: int, end: int, name: str = "Memcpy HtoD", **more: Any) -> Row:
    """A copy on stream 7."""
    return _span(start, end, name, {**GPU, "kind": "memory_copy", "category": "gpu_memcpy", **more})


def call(start: int, end: int, name: str = "cudaLaunchKernel", **more: Any) -> Row:
    """A call of the runtime on thread 1; `flow_out` names what it launches."""
    return _span(start, end, name, {**HOST, "kind": "host", "category": "cuda_runtime", **more})


def host(start: int, end: int, name: str, category: str = "cpu_op", **more: Any) -> Row:
    """An operator, annotation or Python function on thread 1."""
    return _span(start, end, name, {**HOST, "kind": "host", "category": category, **more})


def step(number: int, start: int, end: int) -> Row:
    """The profiler's mark of a step."""
    return host(start, end, f"ProfilerStep#{number}", "user_annotation")


def _span(start: int, end: int, name: str, more: Row) -> Row:
    return {"start_ns": start, "duration_ns": end - start, "name": name, **more}
