"""Clean jobs to plant faults in: simulated steps, recorded as a profiler would have."""

from collections.abc import Callable
from typing import Any

import numpy as np

from meshwright.observe.analyze.spans.device_spans import find_device_spans
from meshwright.observe.analyze.spans.intervals import COMMUNICATION, COMPUTE
from meshwright.predict.event_sim.step_simulation import simulate_step
from meshwright.predict.training_run.training_run import TrainingRun
from meshwright.spec import catalog
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.layout import Layout, ScheduleKind
from meshwright.spec.model import Model, build_gpt
from meshwright.spec.workload import TrainingWorkload
from meshwright.timeline.timeline import Timeline

H100 = (
    '{"name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85018279936, '
    '"computeMajor": 9, "computeMinor": 0}'
)
PER_NODE = 8
LEAD_NS = 3_000_000
"""The host launches so long before the device begins."""
LONGEST_NS = 1_300_000
"""The last bucket, which nothing hides, is cut to this: a clean job shows little of it."""
_NAMES = {
    "attention forward": "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, bf16>>",
    "attention backward": "void flash::flash_bwd_kernel<Flash_bwd_kernel_traits<128, bf16>>",
    "mlp forward": "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN",
    "mlp backward": "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTN",
    "head forward": "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNN",
    "head backward": "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN",
    "optimizer": "void multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>",
}
_ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
GRID = '{"grid": [264, 1, 1], "block": [384, 1, 1], "blocks per SM": 2.0}'

Scale = Callable[[int, int], float]
"""A factor for a rank and a step."""
Pause = Callable[[int, int], int]
"""How many ns a rank's host is late at the begin of a step."""


def _one(_rank: int, _step: int) -> float:
    return 1.0


def _none(_rank: int, _step: int) -> int:
    return 0


def clean_job(
    *,
    ranks: int = 1,
    steps: int = 6,
    seed: int = 0,
    vary: Callable[[np.random.Generator], float] = lambda random: random.normal(1, 0.01),
    compute: Scale = _one,
    more_work: Scale = _one,
    transfer: Scale = _one,
    pause: Pause = _none,
    pause_name: str = "",
    first_rank: int = 0,
    group: str = "dp",
    collective: str = "all_reduce",
    load: Callable[[int], float] = lambda _rank: 1.0,
    rename: Callable[[int, str], str] = lambda _rank, name: name,
) -> list[Timeline]:
    """Ranks that run the simulated step of a small model, data parallel.

    `vary` draws what each kernel and collective takes of its usual time. `compute` makes a rank's
    kernels longer, `more_work` gives it more of them, `transfer` makes collectives longer, `load`
    the bytes of one rank more, `rename` names its kernels otherwise. All ranks wait for the last
    at every collective.
    """
    random = np.random.default_rng(seed)
    kernels, buckets = _simulated()
    rows: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
    flow = 0
    now = np.full(ranks, 10 * LEAD_NS, dtype=np.int64)
    for step in range(steps):
        ready: list[list[int]] = []
        first_launch = []
        for rank in range(ranks):
            late = pause(rank, step)
            lead = 5_000 if late else LEAD_NS
            if late:
                host = {"start": int(now[rank]), "end": int(now[rank]) + late - lead}
                if pause_name:
                    rows[rank].append(_host(host["start"], host["end"], pause_name))
            clock = int(now[rank]) + late
            first_launch.append(int(now[rank]) - LEAD_NS)
            done = []
            for name, length in kernels:
                for _ in range(round(more_work(rank, step) * 4)):
                    took = length / 4 * compute(rank, step)
                    end = clock + max(1, round(took * vary(random)))
                    flow += 1
                    rows[rank] += _kernel(clock, end, rename(rank, name), flow, lead)
                    clock = end
                done.append(clock)
            ready.append(done)
            now[rank] = clock
        free = 0
        for after, length in buckets:
            begun = [max(ready[rank][after], free) for rank in range(ranks)]
            end = max(begun) + round(length * transfer(0, step) * vary(random))
            for rank in range(ranks):
                flow += 1
                members = range(first_rank, first_rank + max(2, ranks))
                said = {
                    "collective": collective, "group": group,
                    "bytes": round(220 * length * load(rank)),
                    "extra": f'{{"Process Group Ranks": "{list(members)}"}}',
                }  # fmt: skip
                rows[rank] += _collective(begun[rank], end, flow, said)
            free = end
        for rank in range(ranks):
            start = max(int(now[rank]), free)
            flow += 1
            rows[rank] += _kernel(start, start + 800_000, _NAMES["optimizer"], flow, LEAD_NS)
            now[rank] = start + 800_000
            stop = int(now[rank]) - LEAD_NS
            rows[rank].append(
                _host(first_launch[rank], stop, f"ProfilerStep#{step}", "user_annotation")
            )
    return [_timeline(own, first_rank + rank) for rank, own in enumerate(rows)]


def run_of(
    model: Model, schedule: ScheduleKind, *, batch: int, pp: int = 1, dp: int = 1
) -> TrainingRun:
    """A training run of sequences of 4096 tokens on H100s."""
    step = TrainingWorkload(tokens=4096 * batch, sequence_length=4096, global_batch=batch)
    layout = Layout(pp=pp, dp=dp, schedule=schedule)
    cluster = catalog.get_cluster("h100-superpod").with_gpus(8)
    return TrainingRun(JobSpec(model=model, cluster=cluster, layout=layout, workload=step))


def _simulated() -> tuple[list[tuple[str, int]], list[tuple[int, int]]]:
    """Kernels of a simulated step with their lengths, and after which of them buckets start."""
    model = build_gpt("small", layers=8, hidden=2048, heads=16, vocab=8192)
    drawn = simulate_step(run_of(model, "1f1b", batch=16, dp=8)).build_timeline()
    part = next(iter(drawn.split_by_rank()))
    spans = find_device_spans(part)
    kernels, ends = [], []
    for at in np.flatnonzero(spans.kind == COMPUTE).tolist():
        name = spans.names[spans.name[at]]
        if name != "optimizer":
            kernels.append((_NAMES[name], int(spans.end[at] - spans.start[at])))
            ends.append(int(spans.end[at]))
    buckets = []
    for at in np.flatnonzero(spans.kind == COMMUNICATION).tolist():
        after = int(np.searchsorted(ends, spans.start[at], side="right")) - 1
        buckets.append((max(0, after), min(LONGEST_NS, int(spans.end[at] - spans.start[at]))))
    return kernels, buckets


def _host(start: int, end: int, name: str, category: str = "cpu_op") -> dict[str, Any]:
    return {"start_ns": start, "duration_ns": end - start, "name": name, "category": category}


def _kernel(start: int, end: int, name: str, flow: int, lead: int) -> list[dict[str, Any]]:
    return [
        _host(start - lead, start - lead + 2_000, "cudaLaunchKernel", "cuda_runtime")
        | {"flow_out": flow},
        {"process": "gpu 0", "lane": "stream 7", "kind": "compute", "category": "kernel",
         "start_ns": start, "duration_ns": end - start, "name": name, "flow_in": flow,
         "extra": GRID},
    ]  # fmt: skip


def _collective(start: int, end: int, flow: int, said: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        _host(start - LEAD_NS, start - LEAD_NS + 2_000, "cudaLaunchKernelExC", "cuda_runtime")
        | {"flow_out": flow},
        {"process": "gpu 0", "lane": "stream 20", "kind": "communication", "category": "kernel",
         "start_ns": start, "duration_ns": end - start, "name": _ALL_REDUCE, "flow_in": flow,
         "dtype": "bf16", **said},
    ]  # fmt: skip


DEFAULTS: dict[str, Any] = {
    "process": "host", "lane": "thread 1", "kind": "host", "flow_in": -1, "flow_out": -1,
    "bytes": -1, "collective": None, "group": None, "dtype": None, "category": None, "extra": None,
}  # fmt: skip


def _timeline(rows: list[dict[str, Any]], rank: int) -> Timeline:
    names = [*DEFAULTS, "start_ns", "duration_ns", "name"]
    filled = [{**DEFAULTS, **row} for row in rows]
    columns = {name: [row[name] for row in filled] for name in names}
    device = f"gpu {rank % PER_NODE}"
    columns["process"] = [device if one == "gpu 0" else one for one in columns["process"]]
    return Timeline.from_columns(
        {"rank": rank, **columns},
        source="measured",
        metadata={"devices": f"[{', '.join([H100] * PER_NODE)}]"},
    )
