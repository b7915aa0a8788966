"""Failures of nodes in closed form: how often a job meets one, and what it keeps of its time."""

import math

DAY_S = 86_400.0


def mttf_s(nodes: float, failures_per_node_day: float) -> float:
    """Return the mean time to a failure of any of a job's nodes: 1 / (nodes · rate)."""
    rate = nodes * failures_per_node_day
    return DAY_S / rate if rate > 0 else math.inf


def failures_per_node_day(failures: float, nodes: float, days: float) -> float:
    """Return the rate at which nodes fail, from what was counted."""
    exposed = nodes * days
    return failures / exposed if exposed > 0 else math.nan


def expected_ettr(mttf_s: float, restart_s: float, interval_s: float, write_s: float) -> float:
    """Return the share of a job's time that trains, to be expected with periodic checkpoints.

    (1 − (restart + interval/2) / MTTF) / (1 + write/interval): Kokolis et al., "Revisiting
    Reliability in Large-Scale Machine Learning Research Clusters", 2025. Half an interval is lost
    with each failure, and writing delays every interval. First order: where failures come faster
    than restarts it is nought.
    """
    lost = (restart_s + interval_s / 2) / mttf_s if mttf_s > 0 else math.inf
    return max(1 - lost, 0.0) / (1 + write_s / interval_s)


def checkpoint_interval_s(mttf_s: float, write_s: float) -> float:
    """Return the interval that loses least: √(2 · write · MTTF) − write (Daly 2006)."""
    return max(math.sqrt(2 * write_s * mttf_s) - write_s, 0.0)
