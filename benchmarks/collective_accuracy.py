"""How close predicted collectives come to what other people measured and published."""

from pathlib import Path
from typing import Any

from meshwright.predict.validation.collectives import (
    PredictionMethod,
    compare_tuning_log,
    read_sweep_rows,
    read_tuning_log,
    score_collectives,
    summarize_collectives,
)

NAME = "collective_accuracy"
QUESTION = "How close do predictions come to published benchmarks of collectives?"

DATA = Path(__file__).parents[1] / "validation" / "collectives"
WAYS: tuple[PredictionMethod, ...] = ("formula", "simulation")


def measure(quick: bool) -> dict[str, object]:
    """Score the published rows both ways, every tenth of them where it is to be quick."""
    rows = read_sweep_rows(DATA / "runs.json")[:: 10 if quick else 1]
    figures: list[dict[str, Any]] = []
    notes = ""
    for by in WAYS:
        found = summarize_collectives(score_collectives(rows, by)).overall
        if found.large_median is None or found.small_median is None:
            raise AssertionError("no row was measured")
        figures += [
            _share(f"{by}, from 1 MiB on, median error", found.large_median, "<= 12"),
            _share(f"{by}, below 1 MiB, median error", found.small_median, "<= 25"),
        ]
        notes = f"{len(rows)} rows, {found.rows} of them measured as a collective of NCCL or raw "
        notes += "RDMA; the constants were fitted to these rows, and what systems and sources that "
        notes += "a fit never saw make of them stands in the guide on communication costs."
    log = compare_tuning_log(read_tuning_log(DATA / "nccl_tuning_h100_2_27_5.json"))
    exact = sum(entry.exact for entry in log) / len(log)
    figures.append(_share("entries of NCCL's tuning log repeated", exact, ">= 95"))
    return {"figures": figures, "peers": [], "notes": notes}


def _share(name: str, value: float, target: str) -> dict[str, Any]:
    return {"name": name, "value": 100 * value, "unit": "%", "target": target}
