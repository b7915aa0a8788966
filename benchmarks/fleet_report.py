"""How long it takes to account for a month of a fleet's GPU-hours."""

import gc
import time

import numpy as np
import pyarrow as pa

from benchmarks.result import figure
from meshwright.cli.fleet.report_page import render_report_page
from meshwright.cli.fleet.report_screen import make_result
from meshwright.fleet.account import build_account
from meshwright.fleet.account.prices import parse_prices
from meshwright.fleet.account.report import build_report
from meshwright.fleet.tables import JOBS, NODES

NAME = "fleet_report"
QUESTION = "How long does it take to account for every GPU-hour of a million jobs?"

DAYS, NODES_OF_8, DAY_S = 30, 1250, 86_400
_FIRST_S = 1_700_006_400.0


def measure(quick: bool) -> dict[str, object]:
    """Account for jobs of 10,000 GPUs, from tables in memory to the screen and the page."""
    count = 20_000 if quick else 1_000_000
    jobs, nodes = _jobs(count), _nodes()
    gc.collect()
    begun = time.process_time()
    found = build_account(jobs, nodes, since_s=_FIRST_S, until_s=_FIRST_S + DAYS * DAY_S)
    accounted = time.process_time() - begun
    report = build_report(found, parse_prices("2.5"), "user", 20)
    told = make_result(report)
    text = render_report_page(report)
    whole = time.process_time() - begun
    if sum(found.sum_cells().values()) != found.capacity or not (told.views and text):
        raise RuntimeError("the account does not close")
    return {
        "figures": [
            figure(f"report of {count:,} jobs", whole, "s", "" if quick else "< 20"),
            figure("of it the account alone", accounted, "s"),
            figure("jobs accounted for", count / whole, "jobs/s"),
        ],
        "peers": [],
        "notes": (
            f"Processor time of one core, from Arrow tables in memory to the answer and the HTML "
            f"page; {NODES_OF_8:,} nodes of 8 GPUs, {DAYS} days, jobs of 1 to 32 GPUs whose nodes "
            "are told. They lie on nodes at random, so that many claim more than a node has."
        ),
    }


def _jobs(count: int) -> pa.Table:
    rng = np.random.default_rng(0)
    gpus = rng.choice([1, 2, 4, 8, 16, 32], count, p=[0.6, 0.1, 0.1, 0.15, 0.03, 0.02])
    lasted = rng.lognormal(7.5, 1.5, count)
    lasted *= 0.7 * NODES_OF_8 * 8 * DAYS * DAY_S / (gpus * lasted).sum()
    start = _FIRST_S + rng.uniform(0, DAYS * DAY_S, count)
    num_nodes = np.maximum(1, gpus // 8)
    ends = np.cumsum(num_nodes)
    within = np.arange(ends[-1]) - np.repeat(ends - num_nodes, num_nodes)
    node = (np.repeat(rng.integers(0, NODES_OF_8, count), num_nodes) + within) % NODES_OF_8
    names = np.array([f"n{at:04d}" for at in range(NODES_OF_8)])
    users = np.array([f"u{at}" for at in range(200)])[rng.integers(0, 200, count)]
    states = np.array(["completed", "failed", "cancelled", "timeout"])
    columns = {
        "cluster": pa.array(np.full(count, "east")),
        "job": pa.array(np.arange(count).astype(str)),
        "attempt": pa.array(np.zeros(count, np.int32)),
        "user": pa.array(users),
        "team": pa.array(users).cast(pa.string()),
        "partition": pa.array(np.full(count, "gpu")),
        "state": pa.array(states[rng.choice(4, count, p=[0.6, 0.2, 0.15, 0.05])]),
        "submit_s": pa.array(start - rng.exponential(600, count)),
        "start_s": pa.array(start),
        "end_s": pa.array(start + lasted),
        "gpus": pa.array(gpus.astype(float)),
        "num_nodes": pa.array(num_nodes.astype(np.int32)),
        "nodes": pa.ListArray.from_arrays(
            pa.array(np.concatenate([[0], ends]), pa.int32()), pa.array(names[node])
        ),
    }
    return pa.table(
        [
            columns[field.name].cast(field.type) if field.name in columns
            else pa.nulls(count, field.type)
            for field in JOBS
        ],
        schema=JOBS,
    )  # fmt: skip


def _nodes() -> pa.Table:
    rows = [
        {"cluster": "east", "node": f"n{at:04d}", "since_s": _FIRST_S, "state": "up", "gpus": 8,
         "partitions": ["gpu"]}
        for at in range(NODES_OF_8)
    ]  # fmt: skip
    return pa.Table.from_pylist([{**dict.fromkeys(NODES.names), **row} for row in rows], NODES)
