"""Holds our figures against published ones: one row for each statistic."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.fleet.sources.public_traces import pai
from meshwright.fleet.sources.public_traces.public_trace_source import (
    RecognizedTable,
    recognize_tables,
)
from meshwright.fleet.validation import (
    distributions,
    job_statistics,
    node_statistics,
    sample_statistics,
)
from meshwright.fleet.validation.queue_replays import replay_packing, replay_workload
from meshwright.fleet.validation.reliability import derive_reliability
from meshwright.fleet.validation.statements import (
    POWER_RATIO_STATEMENT,
    STATEMENTS,
    PaperStatement,
    compare_server_power,
)
from meshwright.fleet.validation.statistic import (
    Statistic,
    StatisticBasis,
    StatisticCaveat,
    Statistics,
)

RELATIVE_TOLERANCE: Final = 0.01
"""Two figures of one definition agree where they differ by no more."""

_OF_FORM: Final[Mapping[str, Callable[[RecognizedTable], Statistics]]] = {
    "Acme jobs": job_statistics.summarize_acme_jobs,
    "Acme jobs of Kalos": job_statistics.summarize_acme_jobs,
    "Helios jobs": job_statistics.summarize_helios_jobs,
    "jobs": job_statistics.summarize_helios_jobs,
    "Philly jobs": job_statistics.summarize_philly_jobs,
    "GPUs by day": job_statistics.summarize_helios_capacity,
    "summaries of clusters": job_statistics.summarize_summary_table,
    "Philly jobs by duration": job_statistics.summarize_philly_durations,
    "runtimes": job_statistics.summarize_runtimes,
    "Muri workload": job_statistics.summarize_workload,
    "Muri run": job_statistics.summarize_finished_run,
    "curves": distributions.read_curve_tables,
    "curves of figures": distributions.read_sampled_durations,
    "pickled curves": distributions.read_pickled_curves,
    "samples side by side": distributions.build_wide_table_cdf,
    "Philly GPU samples": distributions.build_philly_cdf,
    "levels of a virtual cluster": sample_statistics.summarize_virtual_cluster,
    "active nodes": sample_statistics.summarize_active_nodes,
    "levels of a run": sample_statistics.average_run_levels,
    "times of workers": sample_statistics.compare_workers,
    "variations of jobs": sample_statistics.measure_variation,
    "Alibaba 2026 pods": sample_statistics.summarize_pod_metric,
    "rates of pods": sample_statistics.summarize_pod_metric,
    "requests": sample_statistics.count_rows,
    "Alibaba 2023 nodes": node_statistics.count_nodes_2023,
    "Alibaba 2023 pods": node_statistics.summarize_pods_2023,
    "Alibaba 2025 recommenders": node_statistics.summarize_recommenders_2025,
    "Alibaba 2026 nodes": node_statistics.count_nodes_2026,
    "results of packing": node_statistics.average_packing,
}
_ABSENT: Final = (
    ("acme.cluster_summary_published.PAI", "needs PAI's tables of tasks and instances"),
    ("acme.cluster_summary_published", "needs the list of jobs"),
    ("acme.fig4_shares_from_repo_pdf", "needs the list of jobs"),
    ("acme.kalos_all_job_states_thirdparty", "needs the list of jobs"),
    ("helios.cluster_summary_published", "needs the list of jobs"),
    (
        "helios.qssf_on_philly_published",
        "a simulation of all 112,956 jobs, of which the copy has 82,247",
    ),
    ("philly.published_row", "needs the full trace: the copy tells neither waits nor ends"),
    ("alibaba_v2020.pai_published_row", "needs PAI's tables of tasks and instances"),
    ("alibaba_v2020.simulator_log_published", "a simulation, whose workload is not at hand"),
    ("muri.simulator_upstream_run_here", "a simulation, of a policy or cost that is not ours"),
    ("muri.reference_replay_ours", "a simulation: ask for it with --simulate"),
    ("muri.agreement", "one simulator over the other"),
    ("sia_published", "a simulation with models of throughput that the workloads do not hold"),
    ("reliability", "counted by the study, which released no data"),
)


class StatisticComparison(msgspec.Struct, frozen=True, kw_only=True):
    """One statistic: published, ours, and what lies between."""

    name: str
    published: float | None
    """Null: it was asked for ours alone."""
    ours: float | None = None
    difference: float | None = None
    """Ours over the published one, less one; null where that is nought."""
    agrees: bool | None = None
    """Within one per cent, or the same to the digits that were printed; null: not comparable."""
    basis: str = ""
    """`trace`: the same data; `figures`: others that were published; `other`: other data."""
    method: str = ""
    source: str = ""
    reason: str = ""
    """Why it differs, or why there is none of ours."""


def compute_statistics(traces: Path, simulated: bool = False) -> Statistics:
    """Compute every statistic that the traces under a folder allow.

    With `simulated` workloads go through the queue as well, which takes a minute.
    """
    made: Statistics = {}
    by_form: dict[str, list[RecognizedTable]] = {}
    for one in recognize_tables(traces):
        by_form.setdefault(one.format.name, []).append(one)
    for name, parts in by_form.items():
        made_of = _OF_FORM.get(name)
        for part in parts if made_of else ():
            assert made_of is not None
            for path, figure in made_of(part).items():
                if path not in made or figure.caveat.basis < made[path].caveat.basis:
                    made[path] = figure
    for one in by_form.get("Muri workload", []) if simulated else ():
        made |= replay_workload(one)
    if simulated:
        made |= _packed(by_form)
    pods = by_form.get("Alibaba 2026 pods", [])
    activity = [one for one in pods if "gpu_duty_cycle" in one.table.stem]
    memory = [one for one in pods if "gpu_memory_used" in one.table.stem]
    for one in activity:
        made |= sample_statistics.measure_idle_pods(one, memory[0] if memory else None)
    tables = [
        one
        for name in (pai.TASK_FORMAT.name, pai.INSTANCE_FORMAT.name)
        for one in by_form.get(name, [])
    ]
    if len(tables) > 1:
        made |= job_statistics.summarize_pai_tasks(tables)
    return made | compare_server_power(made)


def _packed(by_form: Mapping[str, list[RecognizedTable]]) -> Statistics:
    """Fill Alibaba's cluster of 2023 with the pods that were recorded on it."""
    recorded = [
        one for one in by_form.get("Alibaba 2023 pods", []) if one.table.stem.endswith("default")
    ]
    nodes = by_form.get("Alibaba 2023 nodes", [])
    return replay_packing(nodes[0], recorded[0]) if nodes and recorded else {}


def compare_statistics(
    facts: Path | None, traces: Path, simulated: bool = False
) -> list[StatisticComparison]:
    """Hold each published figure against ours, in the order of the file; then what papers say.

    Without a file of published ones, every figure of ours is a row.
    """
    if facts is None:
        return [
            _ours(name, figure) for name, figure in compute_statistics(traces, simulated).items()
        ]
    published = _read(facts)
    made = compute_statistics(traces, simulated) | derive_reliability(
        published.get("reliability", {})
    )
    rows = [_row(name, value, made.get(name)) for name, value in flatten_numbers(published)]
    return rows + [
        _said(one, made)
        for one in (*STATEMENTS, POWER_RATIO_STATEMENT)
        if one.statistic_path in made
    ]


def flatten_numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Give the numbers of a document with their paths; entries of lists go by what names them."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        if not math.isnan(value):
            yield path, float(value)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from flatten_numbers(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            named = isinstance(inner, dict) and (inner.get("vc") or inner.get("policy"))
            yield from flatten_numbers(inner, f"{path}.{named or place}")


def agrees(ours: float, published: float) -> bool:
    """Say whether two figures are within one per cent, or the same to the digits printed."""
    if abs(ours - published) <= RELATIVE_TOLERANCE * abs(published) + 1e-9:
        return True
    text = f"{published:.12g}"
    digits = len(text.partition(".")[2]) if "e" not in text else 0
    return digits > 0 and round(ours, digits) == published


def _row(name: str, published: float, ours: Statistic | None) -> StatisticComparison:
    if ours is None:
        why = next((why for path, why in _ABSENT if name.startswith(path)), "no such data at hand")
        return StatisticComparison(name=name, published=published, reason=why)
    same = agrees(ours.value, published)
    judged = ours.caveat.basis is not StatisticBasis.OTHER
    return StatisticComparison(
        name=name,
        published=published,
        ours=ours.value,
        difference=ours.value / published - 1 if published else None,
        agrees=same if judged else None,
        basis=ours.caveat.basis.name.lower(),
        method=ours.method,
        source=ours.source,
        reason="" if same and judged else ours.caveat.reason,
    )


def _ours(name: str, figure: Statistic) -> StatisticComparison:
    basis = figure.caveat.basis.name.lower()
    return StatisticComparison(
        name=name,
        published=None,
        ours=figure.value,
        method=figure.method,
        source=figure.source,
        basis=basis,
    )


def _said(one: PaperStatement, made: Statistics) -> StatisticComparison:
    figure = made[one.statistic_path]
    row = _row(
        f"said: {one.name}",
        one.published,
        figure._replace(method=one.method, caveat=StatisticCaveat(one.reason)),
    )
    above, below = figure.value >= one.published, figure.value <= one.published
    if (one.bound == "at least" and above) or (one.bound == "at most" and below):
        return msgspec.structs.replace(row, agrees=True, reason=f"{one.bound} so much is said")
    return row


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError([Problem(str(path), f"cannot read: {error.strerror}")]) from None
    except ValueError as error:
        raise InputError([Problem(str(path), f"is no JSON: {error}")]) from None
    if not isinstance(found, dict):
        raise InputError([Problem(str(path), "is no JSON object of published figures")])
    return found
