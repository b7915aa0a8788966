"""Failures of nodes in closed form: how often they come, and how often a job meets one."""

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
