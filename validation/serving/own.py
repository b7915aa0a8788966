"""Calibrate our own engine's profile to measured steps, and judge it by workloads it was kept from.

    python -m validation.serving.own [TWIN]

`h200_steps.json` has steps of the engine on one H200, and attention of one layer alone. What
attention takes comes from the latter. The other constants are improved one after the other until
the steps' mean error no longer falls; workloads play no part in it. TWIN is a result of
`benchmarks.run serve_twin`: its workloads of one kind are predicted with constants that saw no step
of that kind. Nothing is written: copy what is printed into `predict/serving/cost/serving_engine.py`
by hand.
"""

import json
import math
import statistics
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from benchmarks.serve_twin import CLUSTER, KNOWN, measured_in, simulated
from meshwright.predict.cost.device_costs import build_device_costs
from meshwright.predict.serving.cost.attention_cost import pair_s
from meshwright.predict.serving.cost.quantization import Quantization
from meshwright.predict.serving.cost.replica import Replica
from meshwright.predict.serving.cost.serving_engine import MESHWRIGHT, ServingEngine
from meshwright.predict.serving.cost.step_cost import build_step_cost
from meshwright.spec import catalog

STEPS = Path(__file__).with_name("h200_steps.json")
START = replace(MESHWRIGHT, weight_bandwidth_share=0.8, small_kernels=5.0, launch_s=5e-4)
"""Neutral figures to begin with."""
BOUNDS: dict[str, tuple[float, float]] = {
    "weight_bandwidth_share": (0.75, 0.95),
    "small_kernels": (2.0, 12.0),
    "launch_s": (1e-4, 3e-3),
}
"""What is calibrated to steps; attention is to kernels, the rest counted or not measured."""
HEADS, KV_HEADS, WIDTH = 32, 8, 128
"""Of the attention that was measured alone."""
ROUNDS = 12
"""Grids, each about the root as wide as the one before."""
GRID = 8
"""Points of a grid on either side of what is best so far."""
Kind = tuple[str, bool]
Step = dict[str, Any]


def kind_of(step: Step) -> Kind:
    """Return model and precision."""
    return step["model"], step.get("fp8", False)


@cache
def _replica(kind: Kind, engine: ServingEngine) -> Replica:
    formats = Quantization(weights="fp8", kv="fp8") if kind[1] else Quantization()
    return Replica(
        model=catalog.get_model(kind[0]),
        cluster=catalog.get_cluster(CLUSTER),
        quantization=formats,
        engine=engine,
    )


def error(step: Step, engine: ServingEngine) -> float:
    """Return the logarithm of predicted over measured."""
    # One token repeated draws less power than text does: such steps ran at full clocks.
    used = replace(engine, power_limit_exponent=0.0) if step.get("cool") else engine
    if not step.get("streamed"):
        used = replace(used, max_prefetch_rows=0)
    tokens, decodes = step.get("prompt_tokens", 0), step.get("decodes", 0)
    seconds = build_step_cost(_replica(kind_of(step), used)).step_s(
        prefill_tokens=tokens, prefill_pairs=step.get("pairs", 0), decodes=decodes,
        context_sum=step.get("keys", 0), sampled=max(1, decodes),
    )  # fmt: skip
    return math.log(seconds / step["seconds"])


def loss(steps: Sequence[Step], engine: ServingEngine) -> float:
    """Return the mean error, each kind of step counted alike however often it was measured."""
    found: dict[tuple[object, ...], list[float]] = {}
    for step in steps:
        size = abs(error(step, engine))
        found.setdefault((*kind_of(step), step["what"]), []).append(size)
    return statistics.fmean(statistics.fmean(sizes) for sizes in found.values())


def calibrated(steps: Sequence[Step], engine: ServingEngine = START) -> ServingEngine:
    """Take the best of a grid for one constant after the other, over ever narrower grids."""
    best, reach = loss(steps, engine), 4.0
    for _ in range(ROUNDS):
        for name, (low, high) in BOUNDS.items():
            value = getattr(engine, name)
            if value is None:
                continue
            for place in range(-GRID, GRID + 1):
                moved = min(high, max(low, value * reach ** (place / GRID)))
                tried = replace(engine, **{name: moved})
                now = loss(steps, tried)
                if now < best - 1e-6:
                    engine, best = tried, now
        reach = max(1.02, math.sqrt(reach))
    return engine


def attention(measured: dict[str, Any]) -> dict[str, float]:
    """Return what attention takes, by the least squares of relative errors over its own times."""
    gpu = catalog.get_cluster(CLUSTER).gpu
    pair = HEADS * pair_s(build_device_costs(gpu), WIDTH, WIDTH)
    found: dict[str, float] = {}
    for fp8, before in ((False, ""), (True, "fp8_kv_")):
        prompts = [row for row in measured["prompt_attention"] if row["fp8"] == fp8]
        gap, edge = _least(
            [(pair * row["pairs"] / row["seconds"], pair * row["tokens"] / row["seconds"])
             for row in prompts]
        )  # fmt: skip
        found |= {f"{before}attention_slowdown": gap, f"{before}tile_overhead_keys": edge / gap}
        wide = 2 * KV_HEADS * WIDTH * (1 if fp8 else 2) / gpu.memory_bytes_per_s
        decodes = [row for row in measured["decode_attention"] if row["fp8"] == fp8]
        slope, fixed = _least(
            [(wide * row["keys"] / row["seconds"], 1 / row["seconds"]) for row in decodes]
        )
        found |= {f"{before or 'kv_'}bandwidth_share": 1 / slope, f"{before}attention_s": fixed}
    return found


def _least(rows: list[tuple[float, float]]) -> tuple[float, float]:
    """Return a and b that bring all a · x + b · y nearest to 1."""
    xx, xy, yy = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    x, y = (sum(row[i] for row in rows) for i in (0, 1))
    below = xx * yy - xy * xy
    return (x * yy - y * xy) / below, (y * xx - x * xy) / below


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _told(engine: ServingEngine) -> str:
    return ", ".join(f"{name} {getattr(engine, name) or 0:.3g}" for name in BOUNDS)


def _judge(
    name: str, engine: ServingEngine, twin: dict[str, dict[str, float]], kinds: set[Kind]
) -> None:
    works = [work for work in KNOWN if str(work) in twin and work.kind in kinds]
    if works:
        off = [
            100 * (simulated(work, engine)["tokens_per_s"] / twin[str(work)]["tokens_per_s"] - 1)
            for work in works
        ]
        sizes = [abs(one) for one in off]
        _say(
            f"{name}: {len(off)} workloads, median error {statistics.median(sizes):.1f} %, "
            f"largest {max(sizes):.1f} % ({', '.join(f'{one:+.1f}' for one in off)})"
        )


def main(given: list[str]) -> None:
    """Calibrate to all steps and without each kind; judge where workloads are given."""
    measured = json.loads(STEPS.read_text(encoding="utf-8"))
    # Prompts alone were timed from asking to the answer, and read their keys without pages.
    steps = [step for step in measured["steps"] if not step.get("alone")]
    _say(", ".join(f"{name} {value:.4g}" for name, value in attention(measured).items()))
    twin = measured_in(Path(given[0])) if given else {}
    known = {kind_of(step) for step in steps}
    engine = calibrated(steps)
    _say(f"all steps: {_told(engine)}; mean error {100 * loss(steps, engine):.1f} %")
    _say(f"as it ships: {_told(MESHWRIGHT)}; mean error {100 * loss(steps, MESHWRIGHT):.1f} %")
    _judge("all, calibrated", engine, twin, {work.kind for work in KNOWN})
    _judge("all, as it ships", MESHWRIGHT, twin, {work.kind for work in KNOWN})
    _judge("kinds without steps", engine, twin, {work.kind for work in KNOWN} - known)
    for kind in sorted(known):
        others = [step for step in steps if kind_of(step) != kind]
        engine = calibrated(others)
        name = f"without {kind[0]}{' fp8' if kind[1] else ''}"
        own = [step for step in steps if kind_of(step) == kind]
        _say(f"{name}: {_told(engine)}; its steps {100 * loss(own, engine):.1f} %")
        _judge(f"  {name}", engine, twin, {kind})


if __name__ == "__main__":
    main(sys.argv[1:])
