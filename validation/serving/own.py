"""Calibrate our own engine's profile to measured steps, and judge it by workloads it was kept from.

    python -m validation.serving.own [TWIN]

`h200_steps.json` has steps of the engine on one H200. Constants are improved one after the other
until the steps' mean error no longer falls; workloads play no part in it. TWIN is a result of
`benchmarks.run serve_twin`: its workloads of one kind are predicted with constants that saw no step
of that kind. Nothing is written: copy what is printed into `predict/serving/engine.py` by hand.
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

from benchmarks.serve_twin import CLUSTER, WORKS, measured_in, simulated
from meshwright.predict.serving.engine import MESHWRIGHT, Engine
from meshwright.predict.serving.formats import Formats
from meshwright.predict.serving.replica import Replica
from meshwright.predict.serving.step_cost import step_cost
from meshwright.spec import catalog

STEPS = Path(__file__).with_name("h200_steps.json")
START = replace(
    MESHWRIGHT, weight_share=0.8, kv_share=0.8, narrow_kv_share=0.8, small_kernels=5.0,
    attention_gap=1.0, launch_s=5e-4,
)  # fmt: skip
"""Neutral figures to begin with."""
BOUNDS: dict[str, tuple[float, float]] = {
    "weight_share": (0.75, 0.95),
    "kv_share": (0.6, 0.95),
    "narrow_kv_share": (0.6, 0.95),
    "small_kernels": (2.0, 12.0),
    "attention_gap": (0.8, 4.0),
    "launch_s": (1e-4, 3e-3),
}
"""What is calibrated; the other figures are counted from kernels, or not measured."""
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
def _replica(kind: Kind, engine: Engine) -> Replica:
    formats = Formats(weights="fp8", kv="fp8") if kind[1] else Formats()
    return Replica(
        model=catalog.model(kind[0]), cluster=catalog.cluster(CLUSTER), formats=formats,
        engine=engine,
    )  # fmt: skip


def error(step: Step, engine: Engine) -> float:
    """Return the logarithm of predicted over measured."""
    # One token repeated draws less power than text does: such steps ran at full clocks.
    used = replace(engine, heat=0.0) if step.get("cool") else engine
    tokens, decodes = step.get("prompt_tokens", 0), step.get("decodes", 0)
    seconds = step_cost(_replica(kind_of(step), used)).step_s(
        prefill_tokens=tokens, prefill_pairs=step.get("pairs", 0), decodes=decodes,
        context_sum=step.get("keys", 0), sampled=max(1, decodes),
    )  # fmt: skip
    return math.log(seconds / step["seconds"])


def loss(steps: Sequence[Step], engine: Engine) -> float:
    """Return the mean error, each kind of step counted alike however often it was measured."""
    found: dict[tuple[object, ...], list[float]] = {}
    for step in steps:
        size = abs(error(step, engine))
        found.setdefault((*kind_of(step), step["what"]), []).append(size)
    return statistics.fmean(statistics.fmean(sizes) for sizes in found.values())


def calibrated(steps: Sequence[Step], engine: Engine = START) -> Engine:
    """Take the best of a grid for one constant after the other, over ever narrower grids."""
    if not any(step.get("fp8") for step in steps):
        engine = replace(engine, narrow_kv_share=None)
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


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


def _told(engine: Engine) -> str:
    return ", ".join(f"{name} {getattr(engine, name) or 0:.3g}" for name in BOUNDS)


def _judge(name: str, engine: Engine, twin: dict[str, dict[str, float]], kinds: set[Kind]) -> None:
    works = [work for work in WORKS if str(work) in twin and work.kind in kinds]
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
    steps = json.loads(STEPS.read_text(encoding="utf-8"))["steps"]
    twin = measured_in(Path(given[0])) if given else {}
    known = {kind_of(step) for step in steps}
    engine = calibrated(steps)
    _say(f"all steps: {_told(engine)}; mean error {100 * loss(steps, engine):.1f} %")
    _say(f"as it ships: {_told(MESHWRIGHT)}; mean error {100 * loss(steps, MESHWRIGHT):.1f} %")
    _judge("all, calibrated", engine, twin, {work.kind for work in WORKS})
    _judge("all, as it ships", MESHWRIGHT, twin, {work.kind for work in WORKS})
    _judge("kinds without steps", engine, twin, {work.kind for work in WORKS} - known)
    for kind in sorted(known):
        others = [step for step in steps if kind_of(step) != kind]
        engine = calibrated(others)
        name = f"without {kind[0]}{' fp8' if kind[1] else ''}"
        own = [step for step in steps if kind_of(step) == kind]
        _say(f"{name}: {_told(engine)}; its steps {100 * loss(own, engine):.1f} %")
        _judge(f"  {name}", engine, twin, {kind})


if __name__ == "__main__":
    main(sys.argv[1:])
