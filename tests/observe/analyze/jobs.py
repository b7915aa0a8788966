"""Small jobs of several ranks for tests of what compares ranks: every moment is known."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from meshwright.timeline.timeline import Timeline

US = 1_000


def timeline_of(rows: list[dict[str, Any]], **metadata: str) -> Timeline:
    """Make a measured timeline of rows that name only what matters; times in µs."""
    columns: dict[str, list[Any]] = {}
    for name, default in (
        ("rank", 0), ("process", "gpu 0"), ("lane", "stream 7"), ("kind", "compute"),
        ("name", "kernel"), ("flow_out", -1), ("flow_in", -1), ("bytes", -1), ("collective", None),
        ("group", None), ("category", "kernel"), ("extra", None),
    ):  # fmt: skip
        columns[name] = [row.get(name, default) for row in rows]
    columns["start_ns"] = [round(row["start"] * US) for row in rows]
    columns["duration_ns"] = [round((row["end"] - row["start"]) * US) for row in rows]
    return Timeline.from_columns(columns, source="measured", metadata=metadata)


def collective(rank: int, start: float, end: float, **more: Any) -> dict[str, Any]:
    """A collective's kernel on one rank."""
    return {
        "rank": rank, "start": start, "end": end, "kind": "communication", "lane": "stream 9",
        "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "collective": "all_reduce",
        "group": "dp", "bytes": 1_000_000, **more,
    }  # fmt: skip


def steady_job(
    *,
    ranks: int = 4,
    steps: int = 8,
    compute_us: Callable[[int, int], float] = lambda _rank, _step: 900.0,
    pause_us: Callable[[int, int], float] = lambda _rank, _step: 0.0,
    pause_name: str = "",
    transfer_us: Callable[[int], float] = lambda _step: 100.0,
    clock_us: Mapping[int, Callable[[float], float]] | None = None,
    jitter_us: float = 0.0,
    seed: int = 0,
) -> Timeline:
    """Steps of one kernel and one all-reduce; a rank may compute longer or pause before it.

    A pause is host time without device work, named `pause_name` where one is given. The host of a
    step ends with its last launch.
    """
    random = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    clocks = clock_us or {}
    now = 0.0
    for step in range(steps):
        ready = []
        begin = now
        for rank in range(ranks):
            paused = begin + pause_us(rank, step)
            done = paused + compute_us(rank, step)
            ready.append((begin, paused, done))
        end = max(done for _, _, done in ready) + transfer_us(step)
        for rank, (began, paused, done) in enumerate(ready):
            ended = end + random.uniform(0, jitter_us)
            host = {"rank": rank, "process": "host", "lane": "thread 1", "kind": "host"}
            rows.append(
                {**host, "start": began, "end": paused + 4, "name": f"ProfilerStep#{step}",
                 "category": "user_annotation"}
            )  # fmt: skip
            if paused > began and pause_name:
                rows.append({**host, "start": began, "end": paused, "name": pause_name,
                             "category": "user_annotation"})  # fmt: skip
            flow = 2 * step
            rows.append({**host, "start": paused, "end": paused + 1, "name": "cudaLaunchKernel",
                         "category": "cuda_runtime", "flow_out": flow})  # fmt: skip
            rows.append(
                {"rank": rank, "start": paused, "end": done, "name": "gemm", "flow_in": flow}
            )
            rows.append({**host, "start": paused + 2, "end": paused + 3, "name": "cudaLaunchKernel",
                         "category": "cuda_runtime", "flow_out": flow + 1})  # fmt: skip
            rows.append(collective(rank, done, ended, flow_in=flow + 1))
        now = end + jitter_us
    for row in rows:
        clock = clocks.get(row["rank"])
        if clock is not None:
            length = row["end"] - row["start"]
            row["start"] = clock(row["start"])
            row["end"] = row["start"] + length
    return timeline_of(rows)
