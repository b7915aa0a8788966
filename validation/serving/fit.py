"""Fit what serving engines add to the work itself, and say how well that foretells others' rows.

    python -m validation.serving.fit FILE [--engine NAME] [--rows 300] [--only NAME] [--cross]

Each engine is fitted to all of its rows together, by few constants that are bounded to what is
physically possible. `--cross` leaves out a third of the models, or of the GPUs, at a time, fits the
rest and scores what was left out: that error foretells new rows. The constants that ship come from
all rows; copy them by hand into `src/meshwright/predict/serving/cost/serving_engine.py`.
"""

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwright.predict.serving.cost.serving_engine import (
    ENGINES,
    TENSORRT_LLM_EARLY,
    ServingEngine,
)
from meshwright.predict.validation.serving.case_prediction import predict_case
from meshwright.predict.validation.serving.serving_case import ServingCase, read_case
from meshwright.predict.validation.serving.serving_score import get_load_kind
from meshwright.predict.validation.training.run_model import UnusableRowError

CAP = 0.5
"""Errors beyond this count as this: one broken row must not steer a constant."""
LATE_CAP = 1.0
"""The same of times to the first token, which scatter more."""
PARTS = 3
"""Parts that models and GPUs are dealt into where some are left out."""
WEIGHTS = {"output_tok_s": 1.0, "tpot_s": 0.5, "ttft_s": 0.15}
BOUNDS: dict[str, tuple[float, float]] = {
    "step_s": (5e-5, 2.5e-3),
    "request_s": (1e-7, 4e-5),
    "prefill_s": (1e-6, 1e-3),
    "gemm_slowdown": (0.95, 1.6),
    "attention_slowdown": (0.8, 2.0),
    "kv_bandwidth_share": (0.4, 0.95),
    "attention_s": (1e-6, 3e-5),
    "small_kernels": (0.5, 12.0),
    "all_reduce_latency_s": (2e-6, 4e-5),
    "link_bandwidth_share": (0.1, 0.9),
    "moe_layer_s": (1e-6, 1e-4),
    "frontend_s": (1e-3, 0.4),
    "frontend_steps": (0.25, 40.0),
    "reserve_bytes": (1e9, 1.4e10),
    "logit_copies": (1.0, 16.0),
}
UNFITTED = ("disaggregated", "mlperf-paced")
"""Kinds of rows that say little of an engine: set by how many workers there were, or by how near a
rate came to what the engine can do."""


class Row(NamedTuple):
    """A row that can be fitted to."""

    case: ServingCase
    model: str
    gpu: str


def rows_of(path: Path, engine: ServingEngine, most: int) -> list[Row]:
    """Return up to `most` rows of one engine, evenly over the file."""
    found = []
    for row in json.loads(path.read_text(encoding="utf-8")):
        try:
            case = read_case(row)
        except UnusableRowError:
            continue
        first = case.replicas[0]
        if first.engine.name == engine.name and get_load_kind(case) not in UNFITTED:
            found.append(Row(case, first.model.name, first.cluster.gpu.name))
    stride = max(1, len(found) // most)
    return [row for row in found[::stride] if _fits(row)]


def _fits(row: Row) -> bool:
    try:
        predict_case(row.case)
    except UnusableRowError:
        return False
    return True


def with_engine(case: ServingCase, engine: ServingEngine) -> ServingCase:
    """Return a case under another engine."""
    replicas = tuple(replace(replica, engine=engine) for replica in case.replicas)
    return case._replace(replicas=replicas)


def errors(row: Row, engine: ServingEngine) -> dict[str, float]:
    """Return the logarithms of predicted over measured."""
    try:
        priced = predict_case(with_engine(row.case, engine))
    except UnusableRowError:
        return {"output_tok_s": -CAP}
    found = {}
    for name in WEIGHTS:
        predicted, measured = getattr(priced, name), getattr(row.case.measured, name)
        paced = name == "output_tok_s" and row.case.load.request_load.rate_per_s is not None
        if predicted and measured and not paced:
            found[name] = math.log(predicted / measured)
    return found


def loss(rows: Sequence[Row], engine: ServingEngine) -> float:
    """Return the mean capped error."""
    total = weight = 0.0
    for row in rows:
        for name, error in errors(row, engine).items():
            cap = LATE_CAP if name == "ttft_s" else CAP
            total += WEIGHTS[name] * min(cap, abs(error))
            weight += WEIGHTS[name]
    return total / weight


def fit(
    rows: Sequence[Row], engine: ServingEngine, rounds: int = 4, only: Sequence[str] | None = None
) -> ServingEngine:
    """Improve one constant after the other, in steps that shrink."""
    best = loss(rows, engine)
    step = 1.4
    for number in range(rounds):
        for name in only or BOUNDS:
            if not getattr(engine, name):
                continue  # the engine has no such part
            low, high = BOUNDS[name]
            for factor in (step, 1 / step):
                while True:
                    value = getattr(engine, name)
                    moved = min(high, max(low, value * factor))
                    if math.isclose(moved, value):
                        break
                    tried = replace(engine, **{name: moved})
                    now = loss(rows, tried)
                    if now >= best - 1e-5:
                        break
                    engine, best = tried, now
        _say(f"    round {number + 1}: loss {best:.4f}")
        step = math.sqrt(step)
    return engine


def median(rows: Sequence[Row], engine: ServingEngine) -> dict[str, float]:
    """Return the median size of each kind of error."""
    sizes: dict[str, list[float]] = {}
    for row in rows:
        for name, error in errors(row, engine).items():
            sizes.setdefault(name, []).append(abs(math.expm1(error)))
    return {name: statistics.median(found) for name, found in sizes.items()}


def crossed(
    rows: Sequence[Row], engine: ServingEngine, key: Callable[[Row], str]
) -> dict[str, float]:
    """Return median errors of rows whose model (or GPU) was left out of the fit.

    Groups are dealt into a few parts, the largest first, and each part is left out in turn. Every
    fit starts from constants that no row was asked for.
    """
    sizes: dict[str, list[float]] = {}
    groups = [name for name, _ in Counter(key(row) for row in rows).most_common()]
    start = replace(engine, **{name: getattr(ServingEngine(name=""), name) for name in BOUNDS})
    for part in range(min(PARTS, len(groups))):
        left = set(groups[part::PARTS])
        found = fit([row for row in rows if key(row) not in left], start, rounds=2)
        for row in rows:
            if key(row) in left:
                for name, error in errors(row, found).items():
                    sizes.setdefault(name, []).append(abs(math.expm1(error)))
    return {name: statistics.median(some) for name, some in sizes.items()}


def shown(engine: ServingEngine) -> dict[str, Any]:
    """Return the fitted constants, rounded."""
    return {name: float(f"{getattr(engine, name):.3g}") for name in BOUNDS}


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Fit the engines asked for and print their constants."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--engine", action="append")
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--only", action="append", choices=[*BOUNDS], help="a constant to fit")
    parser.add_argument("--cross", action="store_true")
    args = parser.parse_args()
    for engine in (*ENGINES, TENSORRT_LLM_EARLY):
        if args.engine and engine.name not in args.engine:
            continue
        rows = rows_of(args.runs, engine, args.rows)
        _say(f"{engine.name}, {len(rows)} rows; before: {median(rows, engine)}")
        if args.cross:
            _say(f"  a model left out: {crossed(rows, engine, lambda row: row.model)}")
            _say(f"  a GPU left out: {crossed(rows, engine, lambda row: row.gpu)}")
            continue
        found = fit(rows, engine, only=args.only)
        _say(f"  after: {median(rows, found)}")
        _say(f"  {shown(found)}")


if __name__ == "__main__":
    main()
