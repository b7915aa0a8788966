"""How close predicted steps and memory come to what other people measured and published."""

from pathlib import Path
from typing import Any

from meshwright.predict.validation.training import read_runs, score_runs, summarize_scores

NAME = "step_accuracy"
QUESTION = "How close do predictions come to published training runs?"

RUNS = Path(__file__).parents[1] / "validation" / "training" / "runs.json"


def measure(quick: bool) -> dict[str, object]:
    """Score the published runs, every tenth of them where it is to be quick."""
    rows = read_runs(RUNS)[:: 10 if quick else 1]
    found = summarize_scores(score_runs(rows))
    best, every, memory = found["by_grade"]["A"], found["overall"], found["memory"]
    figures = [
        _share("step time, grade A, median error", best["median_abs"], "<= 5"),
        _share("step time, grade A, 90th percentile", best["p90_abs"], "<= 15"),
        _share("step time, all rows, median error", every["median_abs"], "<= 7"),
        _share("measured inside the interval", every["inside_interval"], ">= 90"),
        _share("memory, median error", memory["median_abs"], "<= 7"),
        _share("memory, 90th percentile", memory["p90_abs"], "<= 15"),
    ]
    notes = f"{len(rows)} rows, {every['rows']} with a measured step."
    if found["ranking"]["groups"]:
        ranks = found["ranking"]
        notes += f" Of {ranks['groups']} groups of layouts, {ranks['at_least_0_9']} have a rank "
        notes += "correlation of 0.9 or more; the best is in our first two in "
        notes += f"{ranks['best_in_top_2']}."
    return {"figures": figures, "peers": [], "notes": notes}


def _share(name: str, value: float, target: str) -> dict[str, Any]:
    return {"name": name, "value": 100 * value, "unit": "%", "target": target}
