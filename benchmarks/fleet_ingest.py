"""How fast a week of a large cluster's telemetry is taken in, asked about and reported on.

Telemetry is made batch by batch, as scrapes of DCGM give it: GPUs run jobs of some hours, each with
an activity of its own, some idle while held, some not held at all. Utilization comes in whole
percents, memory in MiB, clocks and temperatures in whole numbers, shares of cycles in six digits.
Making it is not counted. All of it goes through the code behind `mw fleet ingest`, in this process;
`mw fleet report` runs in one of its own.
Run it alone with `python -m benchmarks.fleet_ingest --gpus 1000 --days 0.25`, or through
`python -m benchmarks.run fleet_ingest` at full size: 10,000 GPUs, 20 metrics, 7 days at 30 s.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

NAME = "fleet_ingest"
QUESTION = "How long does a week of 10,000 GPUs take to keep and to report on, in what memory?"

STEP_S = 30
START_S = 1_790_000_000 // 86_400 * 86_400
NODE_GPUS = 8
BATCH_S = 600
"""One batch has this much time of all GPUs, as a client asks Prometheus for it."""
NOT_HELD = 0.06
"""Turns with a lower draw have no job."""
TARGET_GIB = 6

QUESTIONS = {
    "activity of every node over all time": """
        SELECT node, sum(gpu_util_mean * gpu_util_count) / sum(gpu_util_count) AS util,
               sum(gpu_util_zero * gpu_util_count) AS idle, sum(count) AS samples
        FROM gpu_rollups_5m GROUP BY node""",
    "all metrics of all GPUs over all time": """
        SELECT avg(tensor_active_mean), avg(sm_active_mean), max(power_w_max), avg(power_w_mean),
               max(temperature_c_max), avg(memory_used_max), bit_or(throttle_any),
               avg(nvlink_tx_mean), avg(pcie_rx_mean), avg(dram_active_mean), sum(count)
        FROM gpu_rollups_5m""",
}
ONE_JOB = "samples of eight nodes over six hours"


class Size(NamedTuple):
    """How large the cluster is, and how long it is looked at."""

    gpus: int
    days: float


FULL = Size(10_000, 7)
QUICK = Size(800, 1 / 12)


class Telemetry:
    """A source of samples that are made as they are asked for."""

    def __init__(self, size: Size) -> None:
        import numpy as np

        self.name = f"made {size.gpus} GPUs"
        self.size = size
        self.making_s = self.making_cpu_s = 0.0
        self._random = np.random.default_rng(11)
        gpu = np.arange(size.gpus)
        import pyarrow as pa

        per_batch = BATCH_S // STEP_S
        names = pa.array([f"gpu-node-{index:05d}" for index in range(-(-size.gpus // NODE_GPUS))])
        nodes = pa.array(np.repeat(gpu // NODE_GPUS, per_batch).astype(np.int32))
        self._keys = {
            "cluster": pa.repeat(pa.scalar("east"), size.gpus * per_batch),
            "node": names.take(nodes),
            "gpu": np.repeat(gpu % NODE_GPUS, per_batch).astype(np.int32),
        }
        self._per_batch = per_batch

    def read_batches(self, cursor: str | None = None) -> Iterator[Any]:
        """Give batches of all GPUs, one after the other in time."""
        from meshwright.fleet.sources.source import RowBatch

        if not cursor:
            yield RowBatch("nodes", self._timed(self._nodes))
            yield RowBatch("jobs", self._timed(self._attempts))
        number = int(self.size.days * 86_400 // BATCH_S)
        for index in range(int(cursor or 0), number):
            rows = self._timed(lambda: self._rows(START_S + index * BATCH_S))  # noqa: B023 - now
            yield RowBatch("gpu_samples", rows, str(index + 1))

    def _timed(self, make: Callable[[], Any]) -> Any:
        began, used = time.perf_counter(), time.process_time()
        made = make()
        self.making_s += time.perf_counter() - began
        self.making_cpu_s += time.process_time() - used
        return made

    def _rows(self, start_s: float) -> Any:
        import numpy as np

        from meshwright.fleet.sources.source import make_rows

        per, gpus = self._per_batch, self.size.gpus
        times = np.tile(start_s + STEP_S * np.arange(per, dtype=np.float64), gpus)
        level, memory = (np.repeat(part, per) for part in self._jobs(start_s))
        busy = level > 0
        noise = self._random.standard_normal(per * gpus, np.float32)
        other = self._random.random(per * gpus, np.float32)
        active = np.where(busy, np.clip(level + 0.05 * noise, 0, 1), np.float32(0))
        six = np.round(active * (0.9 + 0.1 * other), 6)
        clock = np.where(busy, np.float32(1980) - 15 * np.floor(8 * other), np.float32(345))
        total = np.full(per * gpus, 85_520_809_984, np.float32)
        link = np.round(six * 2e11)
        return make_rows("gpu_samples", self._keys | {
            "time_s": times,
            "gpu_util": np.round(np.where(busy, np.minimum(1, active + 0.3), 0), 2),
            "engine_active": six,
            "sm_active": np.round(six * 0.83, 6),
            "sm_occupancy": np.round(six * 0.31 + 0.01 * busy * other, 6),
            "tensor_active": np.round(six * 0.46, 6),
            "dram_active": np.round(six * 0.58 + 0.02 * busy * other, 6),
            "fp16_active": np.round(six * 0.02 * other, 6),
            "fp32_active": np.round(six * 0.11, 6),
            "fp64_active": np.zeros(per * gpus, np.float32),
            "memory_used": np.where(busy, memory, np.float32(0)),
            "memory_total": total,
            "power_w": np.round(75 + 600 * six + 2 * noise, 3),
            "temperature_c": np.round(30 + 35 * active + noise),
            "memory_temperature_c": np.round(38 + 40 * active + noise),
            "sm_clock_mhz": clock,
            "throttle": np.where(busy, np.where(other > 0.9, 4, 0), 1).astype(np.float32),
            "pcie_tx": np.round(six * 4e9 * other),
            "pcie_rx": np.round(six * 9e9 * other),
            "nvlink_tx": link,
            "nvlink_rx": link,
        })  # fmt: skip

    def _jobs(self, start_s: float) -> tuple[Any, Any]:
        """Return activity and memory of the job that each GPU runs; nodes change jobs by turns."""
        import numpy as np

        node = np.arange(self.size.gpus) // NODE_GPUS
        draw = _draw(node, (start_s // 3600 + node) // _hours(node))
        level = np.where(draw < 0.12, 0, np.where(draw < 0.25, 0.02, 0.25 + 0.7 * draw))
        memory = np.floor(draw * 80_000) * 2**20
        return level.astype(np.float32), memory.astype(np.float32)

    def _nodes(self) -> Any:
        import numpy as np
        import pyarrow as pa

        from meshwright.fleet.sources.source import make_rows

        number = -(-self.size.gpus // NODE_GPUS)
        return make_rows("nodes", {
            "cluster": pa.repeat(pa.scalar("east"), number),
            "node": [f"gpu-node-{index:05d}" for index in range(number)],
            "since_s": np.full(number, float(START_S)),
            "state": pa.repeat(pa.scalar("up"), number),
            "gpus": np.full(number, NODE_GPUS, np.int32),
            "gpu_kind": pa.repeat(pa.scalar("h100"), number),
            "seen_s": np.full(number, START_S + self.size.days * 86_400),
        })  # fmt: skip

    def _attempts(self) -> Any:
        """Return the job of each turn of each node; now and then a node has none."""
        import numpy as np
        import pyarrow as pa

        from meshwright.fleet.sources.source import make_rows

        first, last = START_S // 3600, int(START_S // 3600 + self.size.days * 24)
        all_nodes = np.arange(-(-self.size.gpus // NODE_GPUS))
        begin, end = ((hour + all_nodes) // _hours(all_nodes) for hour in (first, last))
        node = np.repeat(all_nodes, end - begin + 1)
        counted = np.arange(len(node)) - np.repeat(np.cumsum(end - begin + 1), end - begin + 1)
        turn = counted + np.repeat(end + 1, end - begin + 1)
        held = _draw(node, turn) >= NOT_HELD
        node, turn = node[held], turn[held]
        start_s = 3600.0 * (turn * _hours(node) - node)
        end_s = start_s + 3600.0 * _hours(node)
        until_s = START_S + self.size.days * 86_400
        number = pa.array(np.arange(len(node))).cast(pa.string())
        names = pa.array([[f"gpu-node-{index:05d}"] for index in all_nodes])
        return make_rows("jobs", {
            "cluster": pa.repeat(pa.scalar("east"), len(node)),
            "job": number,
            "attempt": np.zeros(len(node), np.int32),
            "user": pa.array(node * 7 % 211).cast(pa.string()),
            "team": pa.array(node * 7 % 211 % 17).cast(pa.string()),
            "partition": pa.repeat(pa.scalar("gpu"), len(node)),
            "state": np.where(end_s > until_s, "running", "completed").tolist(),
            "submit_s": start_s - 600,
            "start_s": start_s,
            "end_s": np.where(end_s > until_s, np.nan, end_s),
            "gpus": np.full(len(node), float(NODE_GPUS)),
            "gpu_kind": pa.repeat(pa.scalar("h100"), len(node)),
            "num_nodes": np.ones(len(node), np.int32),
            "nodes": names.take(pa.array(node)),
            "seen_s": np.full(len(node), until_s),
        })  # fmt: skip


def _hours(node: Any) -> Any:
    """Return how long jobs of a node are, in hours."""
    return 2 + node % 11


def _draw(node: Any, turn: Any) -> Any:
    """Return a number between 0 and 1 for each turn of a node, the same each time."""
    import numpy as np

    return np.abs(np.sin(node * 12.9898 + turn * 78.233) * 43_758.5453) % 1


def stage(size: Size, folder: Path) -> dict[str, float]:
    """Take telemetry in and ask about it; returns seconds, bytes and rows."""
    from meshwright.fleet.ingestion import ingest
    from meshwright.fleet.store import FleetStore

    telemetry = Telemetry(size)
    began, used = time.perf_counter(), time.process_time()
    with FleetStore(folder, create=True) as store:
        done = ingest(store, telemetry, progress=_told(size))
        took_s = time.perf_counter() - began - telemetry.making_s
        cpu_s = time.process_time() - used - telemetry.making_cpu_s
        rows = done.tables["gpu_samples"].new
        held = store.table_sizes()
        found = {
            "rows": rows,
            "took_s": took_s,
            "cpu_s": cpu_s,
            "samples_bytes": held["gpu_samples"].size_bytes,
            "windows_bytes": held["gpu_rollups_5m"].size_bytes,
        }
        for name, text in QUESTIONS.items():
            began = time.perf_counter()
            answer = store.sql(text)
            found[name] = time.perf_counter() - began
            assert answer.num_rows >= 1
        begin = START_S + size.days * 86_400 / 2
        eight = " OR ".join(f"node = 'gpu-node-{index:05d}'" for index in range(8))
        began = time.perf_counter()
        store.read_table("gpu_samples", ["node", "gpu", "time_s", "gpu_util", "power_w"],
                    since_s=begin, until_s=begin + 6 * 3600, where=eight)  # fmt: skip
        found[ONE_JOB] = time.perf_counter() - began
        again = Telemetry(size._replace(days=min(size.days, 1 / 12)))
        began = time.perf_counter()
        repeated = ingest(store, again, from_start=True)
        same = repeated.tables["gpu_samples"]
        found["again_rows"] = same.duplicates
        found["again_s"] = time.perf_counter() - began - again.making_s
        assert same.new == same.updates == 0
    return found | report(folder)


REPORT = """
import re, sys
from meshwright.cli import main
code = main(["fleet", "report", "--json", "--store", sys.argv[1]])
peak = re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())
print(peak.group(1), file=sys.stderr)
sys.exit(code)
"""


def report(folder: Path) -> dict[str, float]:
    """Report on all of it, in a process of its own; returns seconds and its most memory."""
    began = time.perf_counter()
    # What the kernel counts for a child begins with what its parent held, so it is asked itself.
    line = [sys.executable, "-c", REPORT, str(folder)]
    ended = subprocess.run(line, check=True, capture_output=True, text=True)
    took_s = time.perf_counter() - began
    assert json.loads(ended.stdout)
    return {"report_s": took_s, "report_bytes": 1024 * int(ended.stderr.split()[-1])}


def _told(size: Size) -> Any:
    whole = size.gpus * size.days * 86_400 / STEP_S

    def told(so_far: Any) -> None:
        if sys.stderr.isatty():
            print(f"\r{sum(so_far.total) / whole:.1%}", end="", file=sys.stderr, flush=True)

    return told


def figures(size: Size, found: dict[str, float]) -> list[dict[str, object]]:
    """Return what was measured as figures, with what the full size would take."""
    from meshwright.fleet.tables import GPU_METRICS

    values = found["rows"] * len(GPU_METRICS)
    scale = FULL.gpus * FULL.days / (size.gpus * size.days)
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
    named = f"{size.gpus:,} GPUs, {size.days:g} days"
    rows: list[dict[str, object]] = [
        {"name": f"keep values ({named})", "value": values / found["took_s"], "unit": "1/s"},
        {"name": "keep values, per core", "value": values / found["cpu_s"], "unit": "1/s"},
        {"name": "keep all of it", "value": found["took_s"], "unit": "s"},
        {
            "name": "keep 10,000 GPUs, 7 days" + ("" if scale == 1 else " (extrapolated)"),
            "value": found["took_s"] * scale,
            "unit": "s",
        },
        {"name": "a value on disk", "value": found["samples_bytes"] / values, "unit": "B"},
        {"name": "of it windows, per value", "value": found["windows_bytes"] / values, "unit": "B"},
        {"name": "the same again, values", "unit": "1/s",
         "value": found["again_rows"] * len(GPU_METRICS) / max(found["again_s"], 1e-9)},
        {"name": "most memory", "value": peak, "unit": "GiB", "target": f"< {TARGET_GIB}"},
    ]  # fmt: skip
    rows += [
        {"name": "report on all of it", "value": found["report_s"], "unit": "s"},
        {"name": "report, most memory", "value": found["report_bytes"] / 2**30, "unit": "GiB",
         "target": f"< {TARGET_GIB}"},
    ]  # fmt: skip
    asked = [*QUESTIONS, ONE_JOB]
    return rows + [{"name": f"ask: {name}", "value": found[name], "unit": "s"} for name in asked]


def measure(quick: bool) -> dict[str, object]:
    """Measure at full size, or at one that shows that it works."""
    size = QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        found = stage(size, Path(folder) / "store")
    cores = len(os.sched_getaffinity(0))
    return {
        "figures": figures(size, found),
        "peers": [],
        "notes": f"{size.gpus:,} GPUs, {size.days:g} days at {STEP_S} s, {cores} cores. "
        "Making the telemetry is not counted, but runs in the same process.",
    }


def main() -> None:
    """Measure at a size of choice and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, default=QUICK.gpus)
    parser.add_argument("--days", type=float, default=QUICK.days)
    parser.add_argument("--folder", type=Path, help="keep the store here")
    given = parser.parse_args()
    size = Size(given.gpus, given.days)
    with tempfile.TemporaryDirectory() as folder:
        found = stage(size, given.folder or Path(folder) / "store")
    for row in figures(size, found):
        print(f"{row['name']!s:<48} {row['value']:>16,.3f} {row['unit']}")


if __name__ == "__main__":
    main()
