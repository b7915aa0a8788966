"""Fit the constants of the step model, and say how they do on sources they were not fitted to.

    python -m validation.training.fit

Half of the sources are fitted and the other half scored, both ways round; that error foretells how
new sources will go. The constants that ship come from all rows; copy them by hand into
`src/meshwright/predict/training_run/step_constants.py`. Each is bounded to what is physically
possible.
"""

import hashlib
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from meshwright.predict.step.step_prediction import predict_step
from meshwright.predict.training_run.step_constants import StepConstants
from meshwright.predict.validation.training import read_runs
from meshwright.predict.validation.training.run_score import PreparedRun, prepare_run

RUNS = Path(__file__).with_name("runs.json")
GRADES = frozenset("AB")
CAP = 0.4
"""Errors beyond this count as this: one broken row must not steer a constant."""

BOUNDS: dict[str, tuple[float, float]] = {
    "gemm_slowdown": (1.0, 1.3),
    "attention_slowdown": (1.0, 1.5),
    "power_exponent": (0.2, 0.6),
    "flash1_slowdown": (1.0, 2.0),
    "fused_elementwise": (1.0, 3.0),
    "native_elementwise": (1.0, 4.0),
    "partial_elementwise": (1.0, 4.0),
    "eager_elementwise": (1.0, 6.0),
    "expert_host_s": (0.0, 5e-3),
    "rng_state_sync_s": (0.0, 0.02),
    "tp_overlap_share": (0.0, 0.95),
    "exposed_bucket_share": (0.0, 0.5),
    "expert_overlap_share": (0.0, 1.0),
    "comm_sm_share": (0.0, 0.6),
}


def prepared_rows() -> list[PreparedRun]:
    """Return the rows that can be predicted and are well enough described to fit to."""
    ready = [prepare_run(row) for row in read_runs(RUNS) if row.get("grade") in GRADES]
    return [row for row in ready if row is not None]


def loss(rows: Sequence[PreparedRun], constants: StepConstants) -> float:
    """Return the mean capped error, every source weighing as the root of its rows."""
    by_source: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        by_source[row.source].append(min(CAP, abs(log_error(row, constants))))
    weights = {source: math.sqrt(len(errors)) for source, errors in by_source.items()}
    means = {source: sum(errors) / len(errors) for source, errors in by_source.items()}
    return sum(weights[s] * means[s] for s in means) / sum(weights.values())


def log_error(row: PreparedRun, constants: StepConstants) -> float:
    """Return the logarithm of predicted over measured."""
    return math.log(predict_step(row.build_run(constants)).step_s / row.measured_step_s)


def fit(
    rows: Sequence[PreparedRun], start: StepConstants | None = None, rounds: int = 4
) -> StepConstants:
    """Walk down one constant at a time, with steps that halve each round.

    Without a start it begins in the middle of the bounds and knows nothing of the values that
    ship.
    """
    middle = {name: (low + high) / 2 for name, (low, high) in BOUNDS.items()}
    best = start or StepConstants(**middle)
    best_loss = loss(rows, best)
    for turn in range(rounds):
        for name, (low, high) in BOUNDS.items():
            step = (high - low) / 4 / 2**turn
            for direction in (step, -step):
                while True:
                    value = min(high, max(low, getattr(best, name) + direction))
                    tried = msgspec.structs.replace(best, **{name: round(value, 5)})
                    tried_loss = loss(rows, tried)
                    if tried_loss >= best_loss - 1e-5:
                        break
                    best, best_loss = tried, tried_loss
    return best


def half_of(source: str) -> int:
    """Put a source into one of two halves, the same one every time."""
    return hashlib.sha256(source.encode()).digest()[0] % 2


def spread(rows: Iterable[PreparedRun], constants: StepConstants) -> dict[str, Any]:
    """Return the median and the 90th percentile of the relative error."""
    errors = sorted(abs(math.expm1(log_error(row, constants))) for row in rows)
    return {
        "rows": len(errors),
        "median": errors[len(errors) // 2],
        "p90": errors[min(len(errors) - 1, math.ceil(0.9 * len(errors)) - 1)],
    }


def main() -> None:
    """Fit, cross-validate and print."""
    rows = prepared_rows()
    halves = [[row for row in rows if half_of(row.source) == half] for half in (0, 1)]
    out = sys.stdout
    for here, there in ((0, 1), (1, 0)):
        constants = fit(halves[here])
        inside, outside = spread(halves[here], constants), spread(halves[there], constants)
        out.write(f"fitted half {here}: {inside}\nheld-out half {there}: {outside}\n")
    constants = fit(rows, StepConstants())
    out.write(f"all: {spread(rows, constants)}\n{constants}\n")


if __name__ == "__main__":
    main()
