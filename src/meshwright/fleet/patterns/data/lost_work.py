"""Work that a job lost when it ended before it was done, and how often that happens here."""

from typing import NamedTuple

import numpy as np

from meshwright.fleet.health.xids import load_xid_catalog
from meshwright.fleet.patterns.data.fleet_data import FleetData
from meshwright.fleet.patterns.data.group_math import Flags, Floats, Ints, group_max
from meshwright.predict.long_run.reliability import RELIABILITY

APPLICATION_XIDS = tuple(
    code for code, xid in load_xid_catalog().items() if xid.origin == "application"
)
"""Xids that a program causes: no reason to doubt the GPU."""
NVLINK_XIDS = tuple(code for code, xid in load_xid_catalog().items() if xid.origin == "link")
INFORMATIONAL_XIDS = tuple(
    code for code, xid in load_xid_catalog().items() if xid.origin == "information"
)


class LostWork(NamedTuple):
    """What jobs lost at their end."""

    hours: Floats
    """GPU-hours since the last checkpoint; all of the job's where none is known."""
    known: Flags
    """Whether the job tells of its checkpoints."""


def estimate_lost_work(fleet: FleetData) -> LostWork:
    """What each job would have lost, had it failed at its end."""
    jobs, progress = fleet.jobs, fleet.progress
    saves = progress.phase.equals("checkpoint") & (progress.job >= 0)
    last = group_max(np.where(saves, progress.end_s, np.nan), progress.job, jobs.num_jobs)
    tells = np.zeros(jobs.num_jobs, dtype=np.bool_)
    tells[progress.job[progress.job >= 0]] = True
    since = np.fmax(np.where(np.isnan(last), jobs.start_s, last), jobs.start_s)
    hours = jobs.gpus * np.maximum(np.nan_to_num(jobs.end_s - since), 0) / 3600
    return LostWork(np.minimum(hours, jobs.gpus * jobs.run_s / 3600), tells)


def estimate_failure_rate(fleet: FleetData) -> float:
    """How often hardware ends jobs here; few hours lean on what is published for large clusters."""
    jobs = fleet.jobs
    broken = int(jobs.state.equals("node_fail").sum())
    usual = RELIABILITY.usual_failures_per_gpu_hour
    return (1 + broken) / (1 / usual + float(jobs.gpu_hours.sum()))


def find_allocated_jobs(fleet: FleetData, rows: Ints, after_s: float) -> Ints:
    """The job that held what each event is of, ended within `after_s` of it; -1 for none."""
    faults, uses = fleet.faults, fleet.utilization
    found = np.full(rows.size, -1, dtype=np.int64)
    order = np.argsort(uses.node, kind="stable")
    nodes = uses.node[order]
    for node in np.unique(faults.node[rows]).tolist():
        here = np.flatnonzero(faults.node[rows] == node)
        own = order[np.searchsorted(nodes, node) : np.searchsorted(nodes, node, side="right")]
        if node < 0 or not own.size:
            continue
        own = own[np.argsort(uses.end_s[own], kind="stable")]
        time, gpu = faults.time_s[rows[here]][:, None], faults.gpu[rows[here]][:, None]
        fits = (uses.start_s[own] <= time) & (uses.end_s[own] >= time - 60)
        fits &= (uses.end_s[own] <= time + after_s) & ((gpu < 0) | (uses.gpu[own] == gpu))
        # The first to end of those that fit.
        found[here] = np.where(fits.any(axis=1), uses.job[own[fits.argmax(axis=1)]], -1)
    return found
