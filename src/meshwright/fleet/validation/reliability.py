"""Failures of nodes in closed form: how often they come, and how often a job meets one."""

import math
from collections.abc import Mapping
from typing import Any

from meshwright.fleet.validation.statistic import (
    StatisticBasis,
    StatisticCaveat,
    Statistics,
    make_statistics,
)

DAY_S = 86_400.0


def compute_mttf_s(nodes: float, failures_per_node_day: float) -> float:
    """Return the mean time to a failure of any of a job's nodes: 1 / (nodes · rate)."""
    rate = nodes * failures_per_node_day
    return DAY_S / rate if rate > 0 else math.inf


def compute_node_failure_rate(failures: float, nodes: float, days: float) -> float:
    """Return the rate at which nodes fail, from what was counted."""
    exposed = nodes * days
    return failures / exposed if exposed > 0 else math.nan


_GPUS_PER_NODE = 8

_IMPLICIT = ("job_hang", "mfu_decline", "nan")

_MEASURED = StatisticCaveat(
    "measured, not projected: its jobs did not fail at the cluster's rate", StatisticBasis.OTHER
)

_IMPLIED = StatisticCaveat("", StatisticBasis.FIGURES)

_MANUAL = ("manual_code_data",)


def derive_reliability(facts: Mapping[str, Any]) -> Statistics:
    """Work out what the counts and rates of studies imply."""
    made: Statistics = {}
    llama = facts.get("llama3_54d", {})
    if {"gpus", "days", "unexpected"} <= set(llama):
        made |= _counted("reliability.llama3_54d", llama)
    meta = facts.get("meta_rsc", {})
    if "failures_per_1000_node_days" in meta and "mttf_h" in meta:
        made |= _projected("reliability.meta_rsc.mttf_h", meta)
    robust = facts.get("byterobust", {})
    if "incidents" in robust:
        made |= _incidents("reliability.byterobust.text_totals", robust["incidents"])
    return made


def _counted(path: str, run: Mapping[str, Any]) -> Statistics:
    """Turn a count of interruptions into rates."""
    gpus, days, failed = float(run["gpus"]), float(run["days"]), float(run["unexpected"])
    values = {
        "per_gpu_mtbf_h": gpus * days * 24 / failed,
        "per_node_day_rate": compute_node_failure_rate(failed, gpus / _GPUS_PER_NODE, days),
    }
    made = make_statistics(
        path, values, "unexpected interruptions over what was exposed", "its counts"
    )
    parts = [*run.get("table_counts", {}).values(), *run.get("table_tail_memory", {}).values()]
    sums = {"interruptions_total": failed + float(run.get("planned", 0))}
    if parts:
        sums["unexpected"] = float(sum(parts))
    return made | make_statistics(path, sums, "sum of its parts", "its counts")


def _projected(path: str, study: Mapping[str, Any]) -> Statistics:
    """Project the time to a failure with the rate of the larger cluster."""
    rate = float(study["failures_per_1000_node_days"]["RSC1"]) / 1000
    made: Statistics = {}
    for name in study["mttf_h"]:
        gpus = float(str(name).split()[0])
        measured = "measured" in str(name)
        made |= make_statistics(
            path,
            {name: compute_mttf_s(gpus / _GPUS_PER_NODE, rate) / 3600},
            "1 / (nodes · failures per node-day)",
            "the rate of RSC-1",
            _MEASURED if measured else _IMPLIED,
        )
    return made


def _incidents(path: str, incidents: Mapping[str, float]) -> Statistics:
    implicit = sum(incidents.get(name, 0) for name in _IMPLICIT)
    explicit = sum(count for name, count in incidents.items() if name not in (*_IMPLICIT, *_MANUAL))
    text = "the rows of its table do not add up to the totals of its text"
    why = StatisticCaveat(text, StatisticBasis.FIGURES)
    values = {"explicit": float(explicit), "implicit": float(implicit)}
    return make_statistics(path, values, "sum of the table's rows", "its table", why)
