"""How fast timelines are written, recorded, read and turned into Perfetto files.

Each stage runs in a process of its own, so that its peak memory is its own. Run it alone with
`python benchmarks/timeline_io.py [--spans 10_000_000]`, or through `python -m benchmarks.run`.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "timeline_io"
QUESTION = "How long do 10 million spans take to write, record, read and draw, and in what memory?"

RANKS = 8
NEEDED = ("lane", "start_ns", "duration_ns", "kind", "name")


def columns(spans: int) -> dict[str, Any]:
    """Spans like those of a pipeline-parallel run: 600 kernel names, a tenth communication."""
    import numpy as np

    from meshwright.timeline import DictionaryColumn, SpanKind

    rng = np.random.default_rng(7)
    rank = np.arange(spans, dtype=np.int64) * RANKS // spans
    duration = rng.lognormal(9.5, 1.2, spans).astype(np.int64)
    start = np.cumsum(duration) - duration + 1_700_000_000_000_000_000
    start -= np.take(start, np.searchsorted(rank, np.arange(RANKS)))[rank] - start[0]
    names = [f"void kernel_{i}<cutlass_80_tensorop_bf16_s16816gemm, {i}>" for i in range(600)]
    name = np.minimum(rng.zipf(1.2, spans), 600) - 1
    talks = name % 10 == 9
    number = np.arange(spans, dtype=np.int64)

    def only_talk(values: Any) -> Any:
        return np.where(talks, values, -1)

    return {
        "rank": rank,
        "process": "gpu",
        "lane": DictionaryColumn(
            np.where(talks, 2, number % 2), ("stream 7", "stream 20", "stream 24")
        ),
        "start_ns": start,
        "duration_ns": duration,
        "kind": DictionaryColumn(
            talks.astype(np.int32), (SpanKind.COMPUTE, SpanKind.COMMUNICATION)
        ),
        "name": DictionaryColumn(name.astype(np.int32), names),
        "flow_out": np.where(number % 5 == 0, number, -1),
        "flow_in": np.where(number % 5 == 1, number - 1, -1),
        "bytes": only_talk(1 << (name % 28)),
        "collective": DictionaryColumn(
            only_talk(name % 3).astype(np.int32), ("all_gather", "reduce_scatter", "send")
        ),
        "group": DictionaryColumn(only_talk(name % 3).astype(np.int32), ("dp", "tp", "pp")),
        "stage": rank // 2,
        "microbatch": (number // 400) % 32,
        "layer": (number // 20) % 64,
    }


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    answer = work()
    return time.perf_counter() - started, answer


def _arrow_table(spans: int) -> Any:
    from meshwright.timeline import Timeline

    return Timeline.from_columns(columns(spans), source="simulated").spans


def stage_write(folder: Path, spans: int) -> dict[str, float]:
    """Numpy columns to one Parquet file per rank."""
    from meshwright.timeline import Timeline, write_timeline

    given = columns(spans)
    seconds, _ = _timed(
        lambda: write_timeline(Timeline.from_columns(given, source="simulated"), folder)
    )
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {"s": seconds, "bytes": size}


def stage_record(folder: Path, spans: int) -> dict[str, float]:
    """One call of `span` for each span, flushes and closing included."""
    from meshwright.timeline import TimelineWriter

    def record() -> None:
        with TimelineWriter(folder / "recorded", rank=0) as writer:
            for i in range(spans):
                writer.span("gemm", i * 1000, 900, lane="stream 7", microbatch=3, layer=i & 63)

    return {"s": _timed(record)[0]}


def stage_read(folder: Path, spans: int) -> dict[str, float]:
    """The columns that a breakdown needs, as numpy."""
    from meshwright.timeline import read_timeline

    def load() -> int:
        timeline = read_timeline(folder, columns=NEEDED)
        starts, names = timeline.column("start_ns"), timeline.string_column("name")
        return int(starts.size + 0 * names.codes.size)

    seconds, rows = _timed(load)
    assert rows == spans
    return {"s": seconds}


def stage_read_all(folder: Path, spans: int) -> dict[str, float]:
    """All columns."""
    from meshwright.timeline import read_timeline

    seconds, timeline = _timed(lambda: read_timeline(folder))
    assert timeline.num_spans == spans
    return {"s": seconds}


def stage_perfetto(folder: Path, spans: int) -> dict[str, float]:
    """The folder as Chrome JSON."""
    from meshwright.timeline import write_perfetto

    path = folder.parent / "trace.json"
    seconds, _ = _timed(lambda: write_perfetto(folder, path))
    size = path.stat().st_size
    path.unlink()
    return {"s": seconds, "bytes": size, "spans": spans}


def peer_pyarrow_write(folder: Path, spans: int) -> dict[str, float]:
    """The same columns into one file with Arrow's defaults."""
    import pyarrow.parquet as pq

    table = _arrow_table(spans)
    path = folder / "peer.parquet"
    seconds, _ = _timed(lambda: pq.write_table(table, path))
    size = path.stat().st_size
    path.unlink()
    return {"s": seconds, "bytes": size}


def peer_polars_write(folder: Path, spans: int) -> dict[str, float]:
    """The same columns into one file with Polars' defaults."""
    import polars as pl

    frame = pl.from_arrow(_arrow_table(spans))
    assert isinstance(frame, pl.DataFrame)
    path = folder / "peer.parquet"
    seconds, _ = _timed(lambda: frame.write_parquet(path))
    size = path.stat().st_size
    path.unlink()
    return {"s": seconds, "bytes": size}


def peer_polars_read(folder: Path, spans: int) -> dict[str, float]:
    """The needed columns from our files, read by Polars."""
    import polars as pl

    seconds, frame = _timed(
        lambda: pl.read_parquet(folder / "rank-*.parquet", columns=["rank", *NEEDED])
    )
    assert frame.height == spans
    return {"s": seconds}


def peer_duckdb_query(folder: Path, spans: int) -> dict[str, float]:
    """Time by kind and rank from our files, asked of DuckDB."""
    import duckdb

    query = f"""
        select rank, kind, sum(duration_ns), count(*) from '{folder}/rank-*.parquet' group by all
    """
    seconds, rows = _timed(lambda: duckdb.connect().execute(query).fetchall())
    assert sum(row[3] for row in rows) == spans
    return {"s": seconds}


def peer_json_dumps(folder: Path, spans: int) -> dict[str, float]:
    """Chrome JSON the usual way: one dict per span through `json.dumps`."""
    from meshwright.timeline import read_timeline

    rows = read_timeline(folder, ranks=[0]).spans.slice(0, spans // RANKS).to_pylist()
    kept = ("bytes", "collective", "group", "stage", "microbatch", "layer")

    def dump() -> None:
        events = [
            {
                "ph": "X",
                "name": row["name"],
                "cat": row["kind"],
                "pid": row["rank"],
                "tid": row["lane"],
                "ts": row["start_ns"] / 1000,
                "dur": row["duration_ns"] / 1000,
                "args": {key: row[key] for key in kept if row.get(key) is not None},
            }
            for row in rows
        ]
        (folder.parent / "peer.json").write_text(json.dumps({"traceEvents": events}))

    return {"s": _timed(dump)[0], "spans": len(rows)}


def _run(stage: str, folder: Path, spans: int) -> dict[str, float]:
    """Run one stage in a child process; adds its peak memory in GiB."""
    command = [sys.executable, __file__, "--stage", stage, str(folder), "--spans", str(spans)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    answer: dict[str, float] = json.loads(finished.stdout)
    return answer


def _stage(stage: str, folder: Path, spans: int) -> None:
    # What Arrow loads on first use (its compute functions, pandas) is no part of the job.
    import pyarrow as pa
    import pyarrow.compute
    import pyarrow.parquet

    pa.array([0])

    answer = globals()[stage](folder, spans)
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    print(json.dumps({**answer, "peak_gib": peak / 2**30}))


def measure_spans(spans: int) -> dict[str, object]:
    """Measure with this many spans; the targets are those of 10 million."""
    full = spans >= 10_000_000
    recorded = max(spans // 10, 1)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "timeline"
        write = _run("stage_write", folder, spans)
        read = _run("stage_read", folder, spans)
        read_all = _run("stage_read_all", folder, spans)
        perfetto = _run("stage_perfetto", folder, spans)
        peers = {
            name: _run(name, folder, spans)
            for name in (
                "peer_pyarrow_write",
                "peer_polars_write",
                "peer_polars_read",
                "peer_duckdb_query",
                "peer_json_dumps",
            )
        }
        record = _run("stage_record", folder, recorded)

    def figure(name: str, value: float, unit: str, target: str = "") -> dict[str, object]:
        short = float(f"{value:.4g}")
        return {"name": name, "value": short, "unit": unit} | ({"target": target} if target else {})

    peaks = (write, read, read_all, perfetto)
    return {
        "figures": [
            figure("write, numpy to Parquet", write["s"], "s", "< 15" if full else ""),
            figure("read the columns of a breakdown", read["s"], "s", "< 2" if full else ""),
            figure("read all columns", read_all["s"], "s"),
            figure(
                "peak memory of any of these",
                max(stage["peak_gib"] for stage in peaks),
                "GiB",
                "< 3",
            ),
            figure("size on disk", write["bytes"] / 1e6, "MB"),
            figure(
                "record one span live", record["s"] / recorded * 1e6, "µs", "< 1" if full else ""
            ),
            figure("write Perfetto JSON", perfetto["s"], "s"),
            figure("Perfetto JSON rate", perfetto["spans"] / perfetto["s"], "spans/s"),
            figure("Perfetto JSON size", perfetto["bytes"] / 1e6, "MB"),
            figure("peak memory of Perfetto JSON", perfetto["peak_gib"], "GiB"),
        ],
        "peers": [
            figure("write, pyarrow defaults", peers["peer_pyarrow_write"]["s"], "s"),
            figure("size, pyarrow defaults", peers["peer_pyarrow_write"]["bytes"] / 1e6, "MB"),
            figure("write, Polars defaults", peers["peer_polars_write"]["s"], "s"),
            figure("size, Polars defaults", peers["peer_polars_write"]["bytes"] / 1e6, "MB"),
            figure("read the same columns with Polars", peers["peer_polars_read"]["s"], "s"),
            figure("time by rank and kind with DuckDB", peers["peer_duckdb_query"]["s"], "s"),
            figure(
                "Chrome JSON rate with json.dumps",
                peers["peer_json_dumps"]["spans"] / peers["peer_json_dumps"]["s"],
                "spans/s",
            ),
        ],
        "notes": (
            f"{spans:,} spans of {RANKS} ranks with 600 names, flows on two fifths and attributes; "
            "each stage in its own process, imports not counted, files read from the page cache. "
            f"The live recording has {recorded:,} spans, flushes and closing included. pyarrow and "
            "Polars write one file from a ready table; we also check the columns and write one "
            "file per rank that survives a crash."
        ),
    }


def measure(quick: bool) -> dict[str, object]:
    """Measure 10 million spans, or 200 thousand."""
    return measure_spans(200_000 if quick else 10_000_000)


def main() -> None:
    """Measure and print, or run one stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spans", type=int, default=10_000_000)
    parser.add_argument("--stage", nargs=2, metavar=("STAGE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stage:
        _stage(arguments.stage[0], Path(arguments.stage[1]), arguments.spans)
    else:
        print(json.dumps(measure_spans(arguments.spans), indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
