"""GPUs and nodes that are slower than others that do the same at the same time.

Within a job all GPUs run the same program, so that they are each other's measure: no bound has to
be known of clocks, kinds or models.
"""

from collections.abc import Iterator

import numpy as np

from meshwright.fleet.patterns.data.fleet_data import FleetData
from meshwright.fleet.patterns.data.group_math import Flags, Floats, Ints
from meshwright.fleet.patterns.detectors.hardware import (
    is_clock_locked,
    is_heat_limited,
    is_power_limited,
    measure_clock_deficit,
    median_loaded_clock,
)
from meshwright.fleet.patterns.evidence_text import (
    format_gpus,
    format_hours,
    format_names,
    format_percent,
)
from meshwright.fleet.patterns.fleet_pattern import (
    FleetDetection,
    FleetPattern,
    defer_evidence,
    register_fleet_pattern,
)
from meshwright.fleet.statistics.robust import (
    control_false_discovery,
    group_medians,
    robust_z_scores,
)

MIN_PEERS = 4
"""So many GPUs of a job there must be for one of them to be odd."""
MIN_RELATIVE_SPREAD = 0.01
"""Clocks of sound GPUs differ by about one percent."""


def _relative(fleet: FleetData, name: str, without: Flags | None = None) -> Floats:
    """A figure of each use over the median of its job's GPUs of the same kind; nan for few.

    Uses `without` which others are compared have no figure, and no say in the median.
    """
    uses, kinds = fleet.utilization, fleet.gpu_kinds
    group = uses.job * max(len(kinds.values), 1) + kinds.codes
    group = np.unique(group, return_inverse=True)[1]
    kept = fleet.loaded_uses if without is None else fleet.loaded_uses & ~without
    value = np.where(kept, uses[name], np.nan)
    number = int(group.max(initial=-1)) + 1
    count = np.bincount(group[~np.isnan(value)], minlength=number)
    median = group_medians(value, group, number)
    with np.errstate(divide="ignore", invalid="ignore"):
        found: Floats = value / median[group]
    found[count[group] < MIN_PEERS] = np.nan
    return found


def _explained(fleet: FleetData) -> Flags:
    return is_heat_limited(fleet) | is_power_limited(fleet) | is_clock_locked(fleet)


@register_fleet_pattern(
    FleetPattern(
        "straggler-gpu",
        "One GPU holds its job up",
        "peers",
        "of four or more GPUs of a job one (at most an eighth) has a clock under load 5 % below "
        "their median or more, and a robust score of -6 or less; neither heat nor power is told",
        "estimated: GPU-hours under load of all GPUs of the job times the part that it is slower",
        "take the node out (scontrol update nodename=NODE state=drain reason=slow-gpu), run mw "
        "bench on it and compare; until then --exclude=NODE",
        owner="operators",
        statistic="peer group: robust score (median and MAD) among the GPUs of a job",
    )
)
def find_straggler_gpus(fleet: FleetData) -> Iterator[FleetDetection]:
    """Slower than its siblings."""
    jobs, uses = fleet.jobs, fleet.utilization
    ratio = _relative(fleet, "busy_sm_clock_mhz", _explained(fleet))
    odd = robust_z_scores(ratio, np.where(np.isnan(ratio), -1, uses.job), MIN_RELATIVE_SPREAD)
    slow = (ratio <= 0.95) & (odd <= -6)
    number = np.bincount(uses.job[slow], minlength=jobs.num_jobs)
    few = (number > 0) & (number <= np.maximum(1, fleet.num_sampled_gpus / 8))
    for job in np.flatnonzero(few).tolist():
        own = np.flatnonzero(slow & (uses.job == job))
        worst = own[int(np.argmin(ratio[own]))]
        busy = float(uses["busy_s"][uses.job == job].sum()) / 3600
        node = fleet.node_index.names[int(uses.node[worst])]
        yield FleetDetection(
            busy * float(1 - ratio[worst]),
            defer_evidence(
                lambda worst, node, job: (
                    f"{node}, GPU {uses.gpu[worst]}: {uses['busy_sm_clock_mhz'][worst]:.0f} MHz "
                    f"under load, {format_percent(float(1 - ratio[worst]))} below the other "
                    f"{format_gpus(float(fleet.num_sampled_gpus[job] - 1))} of job "
                    f"{jobs.format_label(job)}",
                ),
                worst,
                node,
                job,
            ),
            jobs=np.array([job]),
            nodes=(node,),
        )


@register_fleet_pattern(
    FleetPattern(
        "slow-node",
        "A node is slower than others in job after job",
        "peers",
        "in three jobs or more, over several nodes each or alone, the GPUs of a node clock lower "
        "than those beside them, 2 % or more on average and improbably often (5 % false discovery)",
        "estimated: GPU-hours under load of those jobs times the part that the node is slower",
        "drain it and run mw bench; compare cooling, power cap and BIOS settings with a sound node",
        owner="operators",
        statistic="sign test over jobs of the node's clock against its kind's or job's median, "
        "false discovery rate of 5 % over all nodes (Benjamini-Hochberg)",
    )
)
def find_slow_nodes(fleet: FleetData) -> Iterator[FleetDetection]:
    """Below the median too often for chance."""
    uses = fleet.utilization
    lost = measure_clock_deficit(fleet)
    clock = np.where(fleet.loaded_uses & ~_explained(fleet), uses["busy_sm_clock_mhz"], np.nan)
    pair = uses.job * max(fleet.node_index.num_nodes, 1) + uses.node
    keys, first, group = np.unique(pair, return_index=True, return_inverse=True)
    ratio = group_medians(clock / median_loaded_clock(fleet), group, keys.size)
    node = uses.node[first]
    known = ~np.isnan(ratio)
    below = known & (ratio < 1)
    trials = np.bincount(node[known], minlength=fleet.node_index.num_nodes)
    lows = np.bincount(node[below], minlength=fleet.node_index.num_nodes)
    level = group_medians(np.where(known, ratio, np.nan), node, fleet.node_index.num_nodes)
    chance = np.array([_at_least(low, of) for low, of in zip(lows, trials, strict=True)])
    believed = control_false_discovery(chance, 0.05) & (trials >= 3) & (level <= 0.98)
    for at in np.flatnonzero(believed).tolist():
        own = np.flatnonzero((uses.node == at) & fleet.loaded_uses)
        mates = np.isin(uses.job, uses.job[own]) & fleet.loaded_uses
        cost = float((uses["busy_s"][mates]).sum()) / 3600 * float(1 - level[at])
        yield FleetDetection(
            cost,
            defer_evidence(
                lambda at, own: (
                    f"{fleet.node_index.names[at]}: clocks {format_percent(float(1 - level[at]))} "
                    f"below the "
                    f"usual in {lows[at]} of {trials[at]} jobs (chance {chance[at]:.1g})",
                    f"{format_hours(float(uses['busy_s'][own].sum()) / 3600)} GPU-hours under load "
                    f"there, "
                    f"GPU {uses.gpu[own[int(np.argmax(lost[own]))]]} worst",
                ),
                at,
                own,
            ),
            nodes=(fleet.node_index.names[at],),
        )


def _at_least(successes: int, trials: int) -> float:
    """Probability of so many heads or more."""
    from math import comb

    if trials == 0:
        return 1.0
    return float(sum(comb(int(trials), at) for at in range(int(successes), int(trials) + 1))) / (
        2.0 ** int(trials)
    )


@register_fleet_pattern(
    FleetPattern(
        "pcie-link-slow",
        "A GPU's link to its host is slower than those beside it",
        "peers",
        "of four or more GPUs of a job that all bring in 0.2 GB/s or more, one has 60 % of their "
        "median peak or less, in two jobs or more",
        "not in GPU-hours: how much a job waits for it depends on its input",
        "nvidia-smi -q -d PCI on the node: Link Width and Link Gen must show the Max; reseat the "
        "card or riser",
        owner="operators",
        statistic="peer group: ratio to the median of the GPUs of a job, repeated over jobs",
    )
)
def find_slow_pcie_links(fleet: FleetData) -> Iterator[FleetDetection]:
    """Half the link, job after job."""
    uses = fleet.utilization
    ratio = _relative(fleet, "peak_pcie_rx")
    slow = (ratio <= 0.6) & (uses["peak_pcie_rx"] / ratio >= 2e8)
    fine = ratio > 0.8
    key = uses.node * 1024 + uses.gpu
    for gpu in np.unique(key[slow]).tolist():
        own: Ints = np.flatnonzero(slow & (key == gpu))
        if own.size < 2 or own.size < 2 * int((fine & (key == gpu)).sum()):
            continue
        node = fleet.node_index.names[gpu // 1024]
        yield FleetDetection(
            None,
            defer_evidence(
                lambda own, node, gpu: (
                    f"{node}, GPU {gpu % 1024}: {format_percent(float(np.median(ratio[own])))} of "
                    f"the peak "
                    f"rate of the GPUs beside it, in jobs "
                    f"{format_names(fleet.jobs.job.at(int(job)) for job in uses.job[own])}",
                ),
                own,
                node,
                gpu,
            ),
            nodes=(node,),
        )
