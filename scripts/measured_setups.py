"""Writes predict/plan/measured.json from the published runs of validation/training.

The package does not ship the runs. What it ships says which setups they cover, and how often pairs
of their layouts were measured in the predicted order, so that a plan can say how sure it is.

    python -m scripts.measured_setups           writes the file
    python -m scripts.measured_setups --check   exits 1 where the file is out of date
"""

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from msgspec.structs import replace

from meshwright.errors import InputError
from meshwright.predict.plan.answer.measured_setups import (
    MeasuredSetup,
    MeasuredSetups,
    PairOrderRecord,
    describe_setup,
)
from meshwright.predict.validation.training.run_cluster import read_cluster
from meshwright.predict.validation.training.run_layout import read_layout
from meshwright.predict.validation.training.run_lora import read_lora
from meshwright.predict.validation.training.run_model import UnusableRowError, read_model
from meshwright.predict.validation.training.run_score import ScoredRun, read_runs, score_runs
from meshwright.spec.job_spec import JobSpec
from meshwright.spec.model import Model
from meshwright.spec.workload import TrainingWorkload

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "validation" / "training" / "runs.json"
TABLE = ROOT / "src" / "meshwright" / "predict" / "plan" / "measured.json"

EDGES = (0.02, 0.05, 0.1, 0.2, 0.4, 1e9)
"""Shares by which predicted steps differ, up to which pairs are counted together."""


def setups(rows: Iterable[Mapping[str, Any]]) -> tuple[MeasuredSetup, ...]:
    """Return the setups of all rows whose step was timed, each once, sorted."""
    return tuple(sorted(set(_setups(rows))))


def _setups(rows: Iterable[Mapping[str, Any]]) -> Iterator[MeasuredSetup]:
    models: dict[str, Model] = {}  # many rows share one, and reading it takes longest
    for row in rows:
        timed = (row.get("derived") or {}).get("step_time_s")
        timed = timed or (row.get("measured") or {}).get("step_time_s")
        if not timed or not row.get("seq") or not row.get("global_batch"):
            continue
        try:
            key = json.dumps(row["model"])
            models[key] = models.get(key) or read_model(row)
            yield _setup(row, models[key])
        except (UnusableRowError, InputError):
            continue


def _setup(row: Mapping[str, Any], model: Model) -> MeasuredSetup:
    read = read_layout(row, model)
    batch = read.layout.global_batch or row["global_batch"]
    training = TrainingWorkload(
        tokens=row["seq"] * batch,
        sequence_length=row["seq"],
        global_batch=batch,
        adapter=read_lora(row)[0],
    )
    cluster, layout = read_cluster(row), read.layout
    found = describe_setup(JobSpec(model=model, cluster=cluster, layout=layout, workload=training))
    if any(text.startswith("zero ") for text in read.assumed):
        found = replace(found, zero=-1)
    return found


def orders(results: Iterable[ScoredRun]) -> tuple[PairOrderRecord, ...]:
    """Count, by how far apart two steps were predicted, how often they were measured so."""
    groups: dict[object, dict[object, list[ScoredRun]]] = defaultdict(lambda: defaultdict(list))
    for result in results:
        if result.predicted_step_s and result.measured_step_s:
            groups[result.layout_key][result.setup].append(result)
    found: list[list[tuple[str, bool]]] = [[] for _ in EDGES]
    for group in groups.values():
        for one, other in combinations(map(_times, group.values()), 2):
            (fast, before, source), (slow, after, _) = sorted((one, other))
            if fast == slow:
                continue  # nothing was predicted about their order
            place = next(at for at, edge in enumerate(EDGES) if slow / fast - 1 < edge)
            found[place].append((source, before < after))
    return tuple(
        PairOrderRecord(
            up_to=edge,
            pairs=len(pairs),
            right=sum(right for _, right in pairs),
            sources=len({source for source, _ in pairs}),
        )
        for edge, pairs in zip(EDGES, found, strict=True)
    )


def _times(same: list[ScoredRun]) -> tuple[float, float, str]:
    """Return the predicted and the median measured time of rows with one layout."""
    measured_s = median(result.measured_step_s or 0.0 for result in same)
    return same[0].predicted_step_s or 0.0, measured_s, same[0].source


def text(table: MeasuredSetups) -> str:
    """Write a table with one setup to a line, so that changes of it can be read."""
    order = ",\n  ".join(msgspec.json.encode(one).decode() for one in table.order)
    lines = ",\n  ".join(msgspec.json.encode(one).decode() for one in table.setups)
    return f'{{"order": [\n  {order}\n ],\n "setups": [\n  {lines}\n ]}}\n'


def main() -> int:
    """Write the file, or say whether it is out of date."""
    rows = read_runs(RUNS)
    wanted = text(MeasuredSetups(order=orders(score_runs(rows)), setups=setups(rows)))
    if "--check" in sys.argv[1:]:
        if TABLE.read_text(encoding="utf-8") == wanted:
            return 0
        print(f"{TABLE.name} is out of date: run python -m scripts.measured_setups")
        return 1
    TABLE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
