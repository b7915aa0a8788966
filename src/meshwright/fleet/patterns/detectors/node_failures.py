"""Faults of the hardware: those that ended jobs, and those that announce themselves."""

from collections.abc import Callable, Iterator

import numpy as np

from meshwright.fleet.patterns.data.fleet_data import FleetData
from meshwright.fleet.patterns.data.group_math import Flags, Floats, Ints
from meshwright.fleet.patterns.data.lost_work import (
    APPLICATION_XIDS,
    INFORMATIONAL_XIDS,
    NVLINK_XIDS,
    estimate_lost_work,
    find_allocated_jobs,
)
from meshwright.fleet.patterns.evidence_text import format_duration, format_names
from meshwright.fleet.patterns.fleet_pattern import (
    FleetDetection,
    FleetPattern,
    defer_evidence,
    register_fleet_pattern,
)
from meshwright.fleet.statistics.robust import (
    control_false_discovery,
    find_count_outliers,
    poisson_tail,
)

LOOKBACK_S = 3600.0
"""A fault so long before a job's end may have caused it."""
PRIOR_NODES = 2.0
"""A user's own rate of failures counts as much as everybody's after so many nodes."""
MAX_CHANCE = 1e-3
"""An event that comes by itself so seldom in that time is no coincidence."""
_LOST = (
    "measured: GPU-hours since the last checkpoint; all of the job's at most, where none is told"
)


def _before_failure(
    name: str, title: str, what: str, which: Callable[[FleetData], Flags], remedy: str
) -> None:
    known = FleetPattern(
        name,
        title,
        "faults",
        f"{what} on the job's own GPU or node in the hour before it failed, where such events are "
        "so seldom that less than one failure in a thousand would meet one by chance, or which "
        "always end a job",
        _LOST,
        remedy,
        owner="operators",
        min_gpu_hours=0.0,
        statistic="Poisson chance of meeting such an event in the hour, from its own rate here",
    )

    @register_fleet_pattern(known)
    def detector(fleet: FleetData) -> Iterator[FleetDetection]:
        jobs, faults = fleet.jobs, fleet.faults
        rows = np.flatnonzero(which(fleet))
        if not rows.size:
            return
        job = find_allocated_jobs(fleet, rows, LOOKBACK_S)
        failed = jobs.state.equals("failed", "node_fail", "requeued", "out_of_memory")
        ended = (job >= 0) & failed[job]
        nodes = max(1, fleet.node_index.num_nodes)
        span = max(fleet.until_s - fleet.since_s, LOOKBACK_S)
        lost = estimate_lost_work(fleet)
        for one in np.unique(job[ended]).tolist():
            own = rows[ended & (job == one)]
            places = max(
                1, int(np.unique(fleet.utilization.node[fleet.utilization.job == one]).size)
            )
            # The rate elsewhere: events that this failure had itself are no background.
            expected = max(rows.size - own.size, 1) / nodes / span * LOOKBACK_S * places
            fatal = faults.kind.equals("xid")[own].any()
            if not fatal and float(poisson_tail(np.array([own.size]), np.array([expected]))[0]) > (
                MAX_CHANCE
            ):
                continue
            yield FleetDetection(
                float(lost.hours[one]),
                defer_evidence(_tell, fleet, own, one, bool(lost.known[one])),
                jobs=np.array([one]),
                nodes=tuple(sorted({fleet.node_index.names[int(faults.node[row])] for row in own})),
            )


def _tell(fleet: FleetData, own: Ints, job: int, known: bool) -> tuple[str, ...]:
    faults, jobs = fleet.faults, fleet.jobs
    first = int(own[0])
    code = f" {faults.code[first]}" if faults.code[first] >= 0 else ""
    where = f", GPU {faults.gpu[first]}" if faults.gpu[first] >= 0 else ""
    before = jobs.end_s[job] - faults.time_s[first]
    lines = [
        f"{fleet.node_index.names[int(faults.node[first])]}{where}: {faults.kind.at(first)}{code}, "
        f"{own.size} in the last {format_duration(max(float(before), 60.0))} of job "
        f"{jobs.format_label(job)} "
        f"({jobs.state.at(job)})"
    ]
    if faults.text.at(first):
        lines.append(faults.text.at(first)[:120])
    if not known:
        lines.append("the job tells of no checkpoint: at most all of it is lost")
    return tuple(lines)


def _xids(fleet: FleetData, codes: tuple[int, ...], *, but: bool = False) -> Flags:
    xid = fleet.faults.kind.equals("xid")
    own: Flags = np.isin(fleet.faults.code, codes)
    return xid & (~own if but else own)


_before_failure(
    "gpu-errors-before-failure",
    "A GPU's own errors ended a job",
    "an Xid of the hardware, uncorrected ECC errors or a row remapping",
    lambda fleet: (
        _xids(fleet, (*APPLICATION_XIDS, *INFORMATIONAL_XIDS, *NVLINK_XIDS), but=True)
        | fleet.faults.kind.equals("ecc", "row_remap")
    ),
    "drain the node, reset the GPU (nvidia-smi -r -i N), run dcgmi diag -r 3; replace it where row "
    "remapping fails or the error comes back",
)
_before_failure(
    "nvlink-errors-before-failure",
    "NVLink errors ended a job",
    "an Xid of NVLink or errors counted on its links",
    lambda fleet: _xids(fleet, NVLINK_XIDS) | fleet.faults.kind.equals("nvlink"),
    "drain the node; nvidia-smi nvlink -e shows the link; reset all GPUs of the node together, "
    "restart nvidia-fabricmanager; reseat or replace the tray where it returns",
)
_before_failure(
    "infiniband-errors-before-failure",
    "InfiniBand errors ended a job",
    "errors or a link down counted on the node's InfiniBand ports",
    lambda fleet: fleet.faults.kind.equals("infiniband"),
    "ibqueryerrors and iblinkinfo name the port; clean or replace cable and transceiver; until "
    "then --exclude=NODE",
)


@register_fleet_pattern(
    FleetPattern(
        "application-fault",
        "A program's own fault, not the GPU's",
        "faults",
        "an Xid that programs cause (13, 31, 43 and others) on the job's own GPU within ten "
        "minutes of its failure",
        _LOST,
        "an illegal address in a kernel: run a small case with CUDA_LAUNCH_BLOCKING=1 and "
        "compute-sanitizer; the node need not be drained",
        min_gpu_hours=0.0,
    )
)
def find_application_faults(fleet: FleetData) -> Iterator[FleetDetection]:
    """Xids of programs."""
    jobs = fleet.jobs
    rows = np.flatnonzero(_xids(fleet, APPLICATION_XIDS))
    job = find_allocated_jobs(fleet, rows, 600.0)
    lost = estimate_lost_work(fleet)
    ended = (job >= 0) & jobs.state.equals("failed", "out_of_memory")[job] if rows.size else rows
    for one in np.unique(job[ended]).tolist() if rows.size else ():
        own = rows[ended & (job == one)]
        yield FleetDetection(
            float(lost.hours[one]),
            defer_evidence(_tell, fleet, own, one, bool(lost.known[one])),
            jobs=np.array([one]),
            nodes=tuple(
                sorted({fleet.node_index.names[int(fleet.faults.node[row])] for row in own})
            ),
        )


@register_fleet_pattern(
    FleetPattern(
        "errors-rising",
        "A GPU or node has far more errors than others: it is likely to fail",
        "faults",
        "errors that were corrected or counted (ECC, row remaps, PCIe replays, NVLink, InfiniBand) "
        "come improbably often, against all other devices (1 % false discovery)",
        "not in GPU-hours: what would be lost is the next job there",
        "drain at the next free moment and run dcgmi diag -r 3 (GPU), ibqueryerrors (port); do not "
        "give it to a job over many nodes before",
        owner="operators",
        statistic="Poisson chance with overdispersion against the fleet's trimmed rate, false "
        "discovery rate of 1 % over all devices (Benjamini-Hochberg)",
    )
)
def find_rising_errors(fleet: FleetData) -> Iterator[FleetDetection]:
    """Counters that rise faster than anybody's."""
    faults = fleet.faults
    for kind in ("ecc", "row_remap", "pcie", "nvlink", "infiniband"):
        rows = np.flatnonzero(faults.kind.equals(kind) & (faults.node >= 0))
        if not rows.size:
            continue
        key = faults.node[rows] * 1025 + faults.gpu[rows] + 1
        devices, where = np.unique(key, return_inverse=True)
        seen = np.bincount(where, minlength=devices.size).astype(np.float64)
        gpus = (
            np.nansum(fleet.node_gpus)
            if (faults.gpu[rows] >= 0).any()
            else fleet.node_index.num_nodes
        )
        outliers = find_count_outliers(seen, int(gpus))
        for at in np.flatnonzero(outliers.is_outlier).tolist():
            node, gpu = int(devices[at] // 1025), int(devices[at] % 1025) - 1
            name = fleet.node_index.names[node] + (f", GPU {gpu}" if gpu >= 0 else "")
            total = float(faults.count[rows[where == at]].sum())
            yield FleetDetection(
                None,
                defer_evidence(
                    lambda name, at, kind, seen, rate, total: (
                        f"{name}: {kind} errors at {seen[at]:.0f} moments ({total:.0f} in all), "
                        f"where {rate:.2g} are usual",
                    ),
                    name,
                    at,
                    kind,
                    seen,
                    outliers.usual,
                    total,
                ),
                nodes=(fleet.node_index.names[node],),
            )


@register_fleet_pattern(
    FleetPattern(
        "lemon-node",
        "Jobs fail on this node more than elsewhere",
        "faults",
        "for three users or more most of their jobs on a node fail, improbably many for what their "
        "jobs do elsewhere (2 % false discovery)",
        _LOST,
        "drain it: scontrol update nodename=NODE state=drain reason=lemon; run mw bench and dcgmi "
        "diag -r 3 before it comes back",
        owner="operators",
        min_gpu_hours=0.0,
        statistic="Poisson chance against what the same users see on other nodes, false "
        "discovery rate of 2 % (Benjamini-Hochberg)",
    )
)
def find_lemon_nodes(fleet: FleetData) -> Iterator[FleetDetection]:
    """More failures than its hours explain."""
    jobs, number = fleet.jobs, fleet.node_index.num_nodes
    kept = (
        (jobs.placement_node >= 0)
        & (jobs.run_s[jobs.placement_job] > 0)
        & (jobs.gpus[jobs.placement_job] > 0)
    )
    job, node = jobs.placement_job[kept], jobs.placement_node[kept]
    parts = np.bincount(job, minlength=jobs.num_jobs)
    bad = jobs.state.equals("failed", "node_fail")[job]
    # One trial for each user on a node: of one who fails with everything there, once is enough.
    _, first, where = np.unique(
        np.stack([node, jobs.user.codes[job]]), axis=1, return_index=True, return_inverse=True
    )
    where = where.ravel()
    ran = np.bincount(where, minlength=first.size)
    weight = np.bincount(where, 1.0 / parts[job], minlength=first.size) / np.maximum(ran, 1)
    failed = np.bincount(where, bad, minlength=first.size) > ran / 2
    place, user = node[first], jobs.user.codes[job[first]] + 1
    trials = np.bincount(place, weight, minlength=number)
    seen = np.bincount(place[failed], weight[failed], minlength=number)
    usual = _expected(user, place, failed.astype(np.float64), weight)
    expected = np.bincount(place, usual * weight, minlength=number)
    chance = poisson_tail(np.floor(seen + 1e-9), np.maximum(expected, 1e-9))
    believed = control_false_discovery(chance, 0.02) & (seen >= 3)
    lost = estimate_lost_work(fleet)
    for at in np.flatnonzero(believed).tolist():
        own = np.unique(job[bad & (node == at)])
        yield FleetDetection(
            float(lost.hours[own].sum()),
            defer_evidence(
                lambda at, own: (
                    f"{fleet.node_index.names[at]}: {seen[at]:.3g} of {trials[at]:.3g} users fail "
                    f"there, where {expected[at]:.2g} are usual for them (chance {chance[at]:.1g})",
                    f"jobs {format_names(jobs.job.at(int(row)) for row in own)}",
                ),
                at,
                own,
            ),
            nodes=(fleet.node_index.names[at],),
        )


def _expected(user: Ints, place: Ints, failed: Floats, weight: Floats) -> Floats:
    """How likely each trial is to fail anywhere else: by its user's other nodes, and everybody's.

    The rate of everybody leaves out the tenth of nodes with most failures, which may be lemons.
    """
    number = int(place.max(initial=-1)) + 1
    of_node = np.bincount(place, failed * weight, minlength=number)
    trials = np.bincount(place, weight, minlength=number)
    share = np.divide(of_node, trials, out=np.zeros(number), where=trials > 0)
    calm = share <= np.quantile(share, 0.9) if number else share > 0
    rate = float(of_node[calm].sum()) / max(float(trials[calm].sum()), 1.0)
    users = int(user.max(initial=-1)) + 1
    tried, lost = np.bincount(user, minlength=users), np.bincount(user, failed, minlength=users)
    pair = user * max(number, 1) + place
    _, inside = np.unique(pair, return_inverse=True)
    here, here_lost = np.bincount(inside), np.bincount(inside, failed)
    elsewhere = tried[user] - here[inside]
    usual: Floats = (lost[user] - here_lost[inside] + PRIOR_NODES * rate) / (
        elsewhere + PRIOR_NODES
    )
    return usual
