"""Holds our figures against published ones: one row for each statistic."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.observe.fleet.published import clusters, curves, inventory, telemetry
from meshwright.observe.fleet.published.figure import Basis, Doubt, Figure, Figures
from meshwright.observe.fleet.published.reliability import closed_forms
from meshwright.observe.fleet.published.simulations import packed, replays
from meshwright.observe.fleet.published.statements import RATIO, STATEMENTS, Statement, servers
from meshwright.observe.fleet.sources.public import found_in, pai
from meshwright.observe.fleet.sources.public.reading import Found

WITHIN: Final = 0.01
"""Two figures of one definition agree where they differ by no more."""

_OF_FORM: Final[Mapping[str, Callable[[Found], Figures]]] = {
    "Acme jobs": clusters.acme_jobs,
    "Acme jobs of Kalos": clusters.acme_jobs,
    "Helios jobs": clusters.helios_jobs,
    "jobs": clusters.helios_jobs,
    "Philly jobs": clusters.philly_jobs,
    "GPUs by day": clusters.helios_capacity,
    "summaries of clusters": clusters.summaries,
    "Philly jobs by duration": clusters.philly_durations,
    "runtimes": clusters.runtimes,
    "Muri workload": clusters.workload,
    "Muri run": clusters.finished_run,
    "curves": curves.tabled,
    "curves of figures": curves.drawn_durations,
    "pickled curves": curves.pickled,
    "samples side by side": curves.side_by_side,
    "Philly GPU samples": curves.philly_samples,
    "levels of a virtual cluster": telemetry.virtual_cluster,
    "active nodes": telemetry.active_nodes,
    "levels of a run": telemetry.levels_of_run,
    "times of workers": telemetry.workers,
    "variations of jobs": telemetry.variations,
    "Alibaba 2026 pods": telemetry.pod_metric,
    "rates of pods": telemetry.pod_metric,
    "requests": telemetry.rows_only,
    "Alibaba 2023 nodes": inventory.nodes_2023,
    "Alibaba 2023 pods": inventory.pods_2023,
    "Alibaba 2025 recommenders": inventory.recommenders_2025,
    "Alibaba 2026 nodes": inventory.nodes_2026,
    "results of packing": inventory.packing,
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


class Row(msgspec.Struct, frozen=True, kw_only=True):
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
    how: str = ""
    of: str = ""
    why: str = ""
    """Why it differs, or why there is none of ours."""


def our_figures(traces: Path, simulated: bool = False) -> Figures:
    """Compute every statistic that the traces under a folder allow.

    With `simulated` workloads go through the queue as well, which takes a minute.
    """
    made: Figures = {}
    by_form: dict[str, list[Found]] = {}
    for one in found_in(traces):
        by_form.setdefault(one.form.name, []).append(one)
    for name, parts in by_form.items():
        made_of = _OF_FORM.get(name)
        for part in parts if made_of else ():
            assert made_of is not None
            for path, figure in made_of(part).items():
                if path not in made or figure.doubt.basis < made[path].doubt.basis:
                    made[path] = figure
    for one in by_form.get("Muri workload", []) if simulated else ():
        made |= replays(one)
    if simulated:
        made |= _packed(by_form)
    pods = by_form.get("Alibaba 2026 pods", [])
    activity = [one for one in pods if "gpu_duty_cycle" in one.part.stem]
    memory = [one for one in pods if "gpu_memory_used" in one.part.stem]
    for one in activity:
        made |= telemetry.idle_pods(one, memory[0] if memory else None)
    tables = [one for name in (pai.TASK.name, pai.INSTANCE.name) for one in by_form.get(name, [])]
    if len(tables) > 1:
        made |= clusters.pai_tasks(tables)
    return made | servers(made)


def _packed(by_form: Mapping[str, list[Found]]) -> Figures:
    """Fill Alibaba's cluster of 2023 with the pods that were recorded on it."""
    recorded = [
        one for one in by_form.get("Alibaba 2023 pods", []) if one.part.stem.endswith("default")
    ]
    nodes = by_form.get("Alibaba 2023 nodes", [])
    return packed(nodes[0], recorded[0]) if nodes and recorded else {}


def compared(facts: Path | None, traces: Path, simulated: bool = False) -> list[Row]:
    """Hold each published figure against ours, in the order of the file; then what papers say.

    Without a file of published ones, every figure of ours is a row.
    """
    if facts is None:
        return [_ours(name, figure) for name, figure in our_figures(traces, simulated).items()]
    published = _read(facts)
    made = our_figures(traces, simulated) | closed_forms(published.get("reliability", {}))
    rows = [_row(name, value, made.get(name)) for name, value in leaves(published)]
    return rows + [_said(one, made) for one in (*STATEMENTS, RATIO) if one.ours in made]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Give the numbers of a document with their paths; entries of lists go by what names them."""
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        if not math.isnan(value):
            yield path, float(value)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from leaves(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            named = isinstance(inner, dict) and (inner.get("vc") or inner.get("policy"))
            yield from leaves(inner, f"{path}.{named or place}")


def agrees(ours: float, published: float) -> bool:
    """Say whether two figures are within one per cent, or the same to the digits printed."""
    if abs(ours - published) <= WITHIN * abs(published) + 1e-9:
        return True
    text = f"{published:.12g}"
    digits = len(text.partition(".")[2]) if "e" not in text else 0
    return digits > 0 and round(ours, digits) == published


def _row(name: str, published: float, ours: Figure | None) -> Row:
    if ours is None:
        why = next((why for path, why in _ABSENT if name.startswith(path)), "no such data at hand")
        return Row(name=name, published=published, why=why)
    same = agrees(ours.value, published)
    judged = ours.doubt.basis is not Basis.OTHER
    return Row(
        name=name,
        published=published,
        ours=ours.value,
        difference=ours.value / published - 1 if published else None,
        agrees=same if judged else None,
        basis=ours.doubt.basis.name.lower(),
        how=ours.how,
        of=ours.of,
        why="" if same and judged else ours.doubt.why,
    )


def _ours(name: str, figure: Figure) -> Row:
    basis = figure.doubt.basis.name.lower()
    return Row(
        name=name, published=None, ours=figure.value, how=figure.how, of=figure.of, basis=basis
    )


def _said(one: Statement, made: Figures) -> Row:
    figure = made[one.ours]
    row = _row(
        f"said: {one.name}", one.published, figure._replace(how=one.how, doubt=Doubt(one.why))
    )
    above, below = figure.value >= one.published, figure.value <= one.published
    if (one.bound == "at least" and above) or (one.bound == "at most" and below):
        return msgspec.structs.replace(row, agrees=True, why=f"{one.bound} so much is said")
    return row


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError([Problem(str(path), f"cannot be read: {error.strerror}")]) from None
    except ValueError as error:
        raise InputError([Problem(str(path), f"is no JSON: {error}")]) from None
    if not isinstance(found, dict):
        raise InputError([Problem(str(path), "is no JSON object of published figures")])
    return found
