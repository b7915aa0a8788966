"""How many jobs the queue simulator takes through a cluster in a second of processor time."""

import csv
import gc
import gzip
import json
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path

from benchmarks.result import figure
from meshwright.policy.job_queue import (
    CountedPool,
    GpuPool,
    JobRequest,
    NodePool,
    NodeSpec,
    make_policy,
    make_uniform_nodes,
)
from meshwright.predict.job_queue import QueueReplay, pack_cluster, simulate_queue

NAME = "queue_simulation"
QUESTION = "How fast are job queues simulated?"

TRACES = Path(__file__).resolve().parents[2] / "shared" / "fleet_traces"
PHILLY = TRACES / "philly" / "philly.csv.gz"
MURI = TRACES / "muri" / "sim_trace4.csv.gz"
PODS = TRACES / "alibaba_v2023" / "openb_pod_list_default.csv.gz"
NODES = TRACES / "alibaba_v2023" / "openb_node_list_gpu_node.csv.gz"
REPEATS = 3
FIFO, BACKFILL = ">= 50_000", ">= 5_000"
BUSY, CROWDED = 704, 512
"""GPUs: on the first thousand jobs wait at times, on the second twelve thousand."""

Jobs = tuple[list[JobRequest], list[float]]


def measure(quick: bool) -> dict[str, object]:
    """Replay Philly and Muri through several policies, and fill Alibaba's cluster."""
    figures, missing = [], []
    if PHILLY.exists():
        jobs = _philly(5000 if quick else None)
        for title, policy, gpus, target in (
            ("FIFO, Philly on 704 GPUs", "fifo", BUSY, FIFO),
            ("FIFO, Philly on 512 GPUs", "fifo", CROWDED, FIFO),
            ("FIFO that lets pass, Philly on 512 GPUs", "fifo-greedy", CROWDED, ""),
            ("EASY backfill, Philly on 704 GPUs", "easy", BUSY, BACKFILL),
            ("EASY backfill, Philly on 512 GPUs", "easy", CROWDED, BACKFILL),
            ("conservative backfill, Philly on 704 GPUs", "conservative", BUSY, BACKFILL),
            ("conservative backfill, Philly on 512 GPUs", "conservative", CROWDED, BACKFILL),
            ("shortest job first, Philly on 512 GPUs", "sjf", CROWDED, ""),
            ("fair share with backfill, Philly on 704 GPUs", "multifactor", BUSY, BACKFILL),
        ):
            figures.append(
                _rate(title, jobs, policy, partial(CountedPool, gpus), quick=quick, target=target)
            )
        for title, policy in (
            ("FIFO on 88 nodes, Philly on 704 GPUs", "fifo"),
            ("EASY backfill on 88 nodes, Philly on 704 GPUs", "easy"),
        ):
            figures.append(_rate(title, jobs, policy, _nodes, quick=quick))
    else:
        missing.append("Philly")
    if MURI.exists():
        muri = _muri(300 if quick else None)
        for policy in ("srsf", "las"):
            title = f"{policy}, Muri's trace 4 on 64 GPUs"
            figures.append(_rate(title, muri, policy, partial(CountedPool, 64), quick=quick))
    else:
        missing.append("Muri")
    if PODS.exists() and NODES.exists():
        figures.append(_packed(quick))
    else:
        missing.append("Alibaba 2023")
    notes = (
        "Jobs over the processor time of one core, the best of three runs, with jobs in memory; "
        "estimates are what jobs took. Philly is the copy of 82,247 jobs that Sia's authors give. "
        "Muri's simulator was timed by the wall on such a machine, alone on it."
    )
    if missing:
        notes += f" Left out, as there is no trace here: {', '.join(missing)}."
    return {"figures": figures, "peers": _peers(), "notes": notes}


def _peers() -> list[dict[str, object]]:
    """Return the rate of Muri's own simulator, as timed when its results were taken down."""
    path = MURI.parent / "reference_results.json"
    if not path.exists():
        return []
    said = json.loads(path.read_text())["upstream_muri_simulator"]["trace4"]["shortest-gpu"]
    rate = said["jobs"] / said["wall_s"]
    return [figure("Muri's simulator, srsf, trace 4 on 64 GPUs", rate, "jobs/s")]


def _rate(
    title: str,
    jobs: Jobs,
    policy: str,
    pool: Callable[[], GpuPool],
    *,
    quick: bool,
    target: str = "",
) -> dict[str, object]:
    def once() -> QueueReplay:
        return simulate_queue(*jobs, pool(), make_policy(policy))

    best = min(_seconds(once) for _ in range(1 if quick else REPEATS))
    return figure(title, len(jobs[0]) / best, "jobs/s", "" if quick else target)


def _packed(quick: bool) -> dict[str, object]:
    asks = [
        JobRequest(
            job_id=row["name"],
            submit_s=0.0,
            gpus=int(row["num_gpu"]) * int(row["gpu_milli"] or 0) / 1000,
            cpus=int(row["cpu_milli"]) / 1000,
            memory_bytes=float(row["memory_mib"]),
            gpu_kinds=tuple(kind for kind in row["gpu_spec"].split("|") if kind),
        )
        for row in _rows(PODS)
    ]
    nodes = [
        NodeSpec(
            gpus=int(row["gpu"]), gpu_kind=row["model"], cpus=int(row["cpu_milli"]) / 1000,
            memory_bytes=float(row["memory_mib"]),
        )
        for row in _rows(NODES)
    ]  # fmt: skip
    ratio = 0.1 if quick else 1.3
    seconds = _seconds(lambda: pack_cluster(nodes, asks, "fragmentation", ratio=ratio))
    return figure("1,213 nodes filled by fragmentation gradient descent", seconds, "s")


def _seconds(work: Callable[[], object]) -> float:
    gc.collect()
    start = time.process_time()
    found = work()
    took = time.process_time() - start
    if isinstance(found, QueueReplay):
        # What was simulated has to be whole to count.
        assert (found.end_s >= found.first_s + found.durations_s - 1e-3).all()
    return took


def _nodes() -> GpuPool:
    return NodePool(make_uniform_nodes(BUSY, 8), "best-fit")


def _rows(path: Path) -> list[dict[str, str]]:
    with gzip.open(path, "rt") as lines:
        return list(csv.DictReader(lines))


def _philly(first: int | None) -> Jobs:
    asks, run_s = [], []
    for at, row in enumerate(_rows(PHILLY)[:first]):
        lasts_s = float(row["duration"])
        submit_s = datetime.fromisoformat(row["timestamp"]).timestamp()
        asks.append(
            JobRequest(
                job_id=str(at), submit_s=submit_s, gpus=int(row["num_gpus"]), estimate_s=lasts_s,
                team=row["cluster"],
            )
        )  # fmt: skip
        run_s.append(lasts_s)
    return asks, run_s


def _muri(first: int | None) -> Jobs:
    asks, run_s = [], []
    for row in _rows(MURI)[:first]:
        lasts_s = int(row["duration"]) / 1000
        submit_s = int(row["submit_time"]) / 1000
        gpus = int(row["num_gpu"])
        asks.append(
            JobRequest(job_id=row["job_id"], submit_s=submit_s, gpus=gpus, estimate_s=lasts_s)
        )
        run_s.append(lasts_s)
    return asks, run_s
