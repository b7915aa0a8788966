"""`PrometheusSource`: a fleet's telemetry, slice by slice, going on where it was left.

Moments are multiples of the step, so that a second reading gives the same rows. Each ingest reads
the last minutes of the one before again, because samples come late.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa

from meshwright.errors import InputError, Problem
from meshwright.fleet.sources.prometheus.client import PrometheusClient
from meshwright.fleet.sources.prometheus.credentials import read_credentials
from meshwright.fleet.sources.prometheus.fault_events import read_fault_events
from meshwright.fleet.sources.prometheus.gpu_samples import has_gpu_metrics, read_gpu_samples
from meshwright.fleet.sources.prometheus.label_allocations import (
    OVERLAP_S,
    AllocationTracker,
    read_labels,
)
from meshwright.fleet.sources.prometheus.labels import NodeNaming
from meshwright.fleet.sources.prometheus.metric_names import METRIC_FIELDS
from meshwright.fleet.sources.prometheus.node_samples import (
    has_node_metrics,
    read_instance_names,
    read_node_samples,
)
from meshwright.fleet.sources.prometheus.progress import read_progress
from meshwright.fleet.sources.prometheus.query import PrometheusScope, QueryWindow
from meshwright.fleet.sources.prometheus.time_grid import TimeGrid, split_grids
from meshwright.fleet.sources.source import RowBatch, SourceOptions
from meshwright.fleet.tables import ALLOCATIONS, GPU_SAMPLES, JOBS

OPTIONS = ("token_file", "token_env", "user", "password_file", "password_env", "tenant", "selector",
    "node_label", "domain", "renames", "settle_s")  # fmt: skip
MAX_ROWS = 250_000
"""In a batch."""
_CELLS = 1_000_000
"""Samples of one metric in one answer."""
_PREFIXES = ("DCGM_FI_", "DCGM_EXP_", "mw_", "nvidia_gpu_", "nvidia_smi_", "node_", "lustre_",
    "gpfs_perf_", "kube_")  # fmt: skip
_WANTED = '{__name__=~"(' + "|".join(_PREFIXES) + ').*"}'
_SETTLE_S = 60.0
"""Samples younger than this may still be on their way."""
_OF_HOSTS = "node_memory_MemTotal_bytes"
_MUCH = 3e8
"""Samples that take several minutes to travel."""
_LOOKS = 6
"""Moments at which the pace of samples is looked at."""
_LONGEST_BACK = 1024
"""Days."""


class _Cursor(NamedTuple):
    until_s: float
    holding: Mapping[str, Any]
    pods_until_s: float | None
    """Up to where pods and nodes were read."""
    nodes: dict[str, tuple[str, float]]
    """How nodes stood then."""
    names: dict[str, tuple[str, int, int]]
    """The last pods behind names that may come back."""


class PrometheusSource:
    """One server, asked for one fleet."""

    def __init__(
        self, server: PrometheusClient, asked: SourceOptions, now: Callable[[], float] = time.time
    ) -> None:
        self._server, self._asked, self._now = server, asked, now
        self._notes: list[str] = []
        self._settle_s = _number(asked.kind_options, "settle_s", _SETTLE_S)
        self._naming = NodeNaming(
            asked.kind_options.get("node_label", ""),
            asked.kind_options.get("domain", ""),
            _renames(asked.kind_options),
        )

    @property
    def name(self) -> str:
        """Where it is, without credentials."""
        selector = self._asked.kind_options.get("selector", "")
        return f"prometheus {self._server.url}" + (f" {{{selector}}}" if selector else "")

    def read_batches(self, cursor: str | None = None) -> Iterator[RowBatch]:
        """Give rows slice by slice."""
        try:
            yield from self._batches(_read_cursor(cursor))
        finally:
            self._server.close()

    def _batches(self, left: _Cursor | None) -> Iterator[RowBatch]:
        asked = self._asked
        until_s = self._now() - self._settle_s if asked.until_s is None else asked.until_s
        since_s = asked.since_s
        if left is not None:
            since_s = max(since_s or 0.0, left.until_s - OVERLAP_S)
        if since_s is None:
            since_s = self._oldest(until_s)
        fleet, count = self._look(since_s, until_s)
        if not (has_gpu_metrics(fleet.metric_names) or has_node_metrics(fleet.metric_names)):
            note = f"{self._server.url} has no metrics of GPUs or nodes in this time"
            self._notes.append(note)
        columns = sum(
            any(one.name in fleet.metric_names for one in each.names) for each in METRIC_FIELDS
        )
        asked_for = columns * count * (until_s - since_s) / asked.sample_step_s
        if asked_for > _MUCH and asked.sample_step_s < 300:
            self._notes.append(
                f"{asked_for:.1g} samples are asked for; --step 5min lets the server roll them up"
            )
        if self._notes:
            yield RowBatch("gpu_samples", GPU_SAMPLES.empty_table(), None, tuple(self._notes))
            self._notes.clear()
        left = left or _Cursor(since_s, {}, None, {}, {})
        holding = AllocationTracker(left.holding)
        slices = list(
            split_grids(since_s, until_s, asked.sample_step_s, max(1, min(5_000, _CELLS // count)))
        )
        for grid in slices:
            yield from self._slice(fleet, grid, holding, last=grid is slices[-1])
            left = left._replace(until_s=grid.end_s, holding=holding.to_cursor())
            # All rows of the slice came before this: from here another ingest goes on.
            yield RowBatch("allocations", ALLOCATIONS.empty_table(), json.dumps(left._asdict()))
        yield from self._jobs(fleet, since_s, until_s, left)

    def _slice(
        self, fleet: PrometheusScope, grid: TimeGrid, holding: AllocationTracker, *, last: bool
    ) -> Iterator[RowBatch]:
        cut = QueryWindow(self._server, fleet, grid)
        samples, notes = read_gpu_samples(cut)
        yield from _pieces("gpu_samples", samples, notes)
        if has_node_metrics(fleet.metric_names):
            yield from _pieces("node_samples", read_node_samples(cut), ())
        yield RowBatch("events", read_fault_events(cut))
        yield RowBatch("progress", read_progress(cut))
        gpus, allocations = holding.add_snapshot(read_labels(cut), cut, _memory(samples), last=last)
        yield RowBatch("gpus", gpus)
        yield RowBatch("allocations", allocations, None, self._server.pop_notes())

    def _jobs(
        self, fleet: PrometheusScope, since_s: float, until_s: float, left: _Cursor
    ) -> Iterator[RowBatch]:
        if (
            "kube_pod_status_phase" not in fleet.metric_names
            and "kube_node_info" not in fleet.metric_names
        ):
            return
        from meshwright.fleet.sources.prometheus.state_metrics.pods import (
            StateMetricsCursor,
            read_state_metrics,
        )

        if left.pods_until_s is not None:
            since_s = min(left.pods_until_s - OVERLAP_S, until_s)
        before = StateMetricsCursor(left.nodes, left.names)
        found, known = read_state_metrics(self._server, fleet, since_s, until_s, before)
        for table, rows in found:
            yield RowBatch(table, rows, None, self._server.pop_notes())
        left = left._replace(pods_until_s=until_s, **known._asdict())
        yield RowBatch("jobs", JOBS.empty_table(), json.dumps(left._asdict()))

    def _look(self, since_s: float, until_s: float) -> tuple[PrometheusScope, int]:
        """Find which metrics there are, how often they are scraped, and of how many GPUs."""
        names = frozenset(self._server.list_metric_names(_WANTED, since_s, until_s))
        fleet = PrometheusScope(
            "", names, self._asked.kind_options.get("selector", ""), self._naming
        )
        fleet = fleet._replace(cluster=self._cluster(fleet, since_s, until_s))
        known = read_instance_names(self._server, fleet, since_s, until_s)
        fleet = fleet._replace(node_naming=self._naming._replace(node_by_instance=known))
        return self._paced(fleet, since_s, until_s)

    def _cluster(self, fleet: PrometheusScope, since_s: float, until_s: float) -> str:
        """Find the name of the fleet; where a server holds several, say that they are mixed."""
        known = [
            one.name
            for each in METRIC_FIELDS
            for one in each.names
            if one.name in fleet.metric_names
        ]
        metric = fleet.build_selector(known[0] if known else _OF_HOSTS)
        found = sorted(self._server.list_label_values("cluster", metric, since_s, until_s) - {""})
        if len(found) > 1:
            self._notes.append(
                f"{self._server.url} holds the clusters {', '.join(found)}: they are read as one; "
                "read each with --cluster NAME --option selector='cluster=\"NAME\"'"
            )
        own = found[0] if len(found) == 1 else urlsplit(self._server.url).hostname
        return self._asked.cluster or own or "prometheus"

    def _paced(
        self, fleet: PrometheusScope, since_s: float, until_s: float
    ) -> tuple[PrometheusScope, int]:
        """Find how far samples are apart and how many series a metric has.

        Several moments are tried, because exporters fall silent.
        """
        known = [
            one.name
            for each in METRIC_FIELDS
            for one in each.names
            if one.name in fleet.metric_names
        ]
        counted = f"count_over_time({fleet.build_selector(known[0] if known else _OF_HOSTS)}[10m])"
        most, series = 0.0, 0.0
        for at_s in np.linspace(since_s, until_s, _LOOKS + 1)[1:]:
            for each in self._server.query_instant(f"max({counted})", at_s):
                most = max(most, float(each.values[-1]))
            for each in self._server.query_instant(f"count({counted})", at_s):
                series = max(series, float(each.values[-1]))
        scrape_s = max(1.0, float(round(600 / most))) if most else fleet.scrape_interval_s
        return fleet._replace(scrape_interval_s=scrape_s), max(1, int(series))

    def _oldest(self, until_s: float) -> float:
        """Find how far back samples go, to the next power of two in days.

        All powers are tried: a fleet may have been silent for a while.
        """
        oldest = 1
        for power in range(_LONGEST_BACK.bit_length() - 1):
            at_s = until_s - 86400 * 2**power
            if self._server.list_metric_names(_WANTED, at_s - 86400 * 2**power, at_s):
                oldest = 2 ** (power + 1)
        return until_s - 86400 * oldest


def matches(where: str) -> bool:
    """Return whether this is a URL; kinds that recognize particular URLs are matched first."""
    return where.startswith(("http://", "https://", "prometheus+http://", "prometheus+https://"))


def open_source(where: str, asked: SourceOptions) -> PrometheusSource:
    """Open the server at a URL as it is asked for."""
    unknown = sorted(set(asked.kind_options) - set(OPTIONS))
    if unknown:
        fix = f"options of Prometheus are {', '.join(OPTIONS)}"
        raise InputError([Problem(f"--option {each}", "is not known", fix) for each in unknown])
    url = where.removeprefix("prometheus+")
    who = read_credentials(asked.token, asked.kind_options)
    tenant = asked.kind_options.get("tenant", "")
    server = PrometheusClient(
        url, who, ca_file=asked.ca_file, tenant=tenant, tell=asked.on_progress
    )
    return PrometheusSource(server, asked)


def _pieces(table: str, rows: pa.Table, notes: tuple[str, ...]) -> Iterator[RowBatch]:
    for first in range(0, max(rows.num_rows, 1), MAX_ROWS):
        yield RowBatch(table, rows.slice(first, MAX_ROWS), None, notes)


def _memory(samples: pa.Table) -> dict[tuple[str, int], float]:
    found = samples.group_by(["node", "gpu"]).aggregate([("memory_total", "max")]).to_pydict()
    rows = zip(found["node"], found["gpu"], found["memory_total_max"], strict=True)
    return {(node, gpu): most for node, gpu, most in rows if most is not None}


def _read_cursor(text: str | None) -> _Cursor | None:
    if not text:
        return None
    try:
        found = json.loads(text)
        nodes = {node: (str(state), float(at)) for node, (state, at) in found["nodes"].items()}
        names = {job: (str(uid), int(at), int(to)) for job, (uid, at, to) in found["names"].items()}
        pods_s = found["pods_until_s"]
        return _Cursor(float(found["until_s"]), dict(found["holding"]), pods_s, nodes, names)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None  # of another version: read from the start, rows that come twice are one


def _number(options: Mapping[str, str], name: str, otherwise: float) -> float:
    try:
        return float(options.get(name, otherwise))
    except ValueError:
        fix = f"give seconds, such as {otherwise:g}"
        raise InputError([Problem(f"--option {name}", "is no number", fix)]) from None


def _renames(options: Mapping[str, str]) -> dict[str, str]:
    text = options.get("renames", "")
    pairs = [each.split("=", 1) if "=" in each else each.split(":", 1)
             for each in text.split(",") if each]  # fmt: skip
    if any(len(each) != 2 for each in pairs):
        fix = "write OLD:NEW,OLD:NEW"
        raise InputError([Problem("--option renames", f"{text!r} is not understood", fix)])
    return {old.strip(): new.strip() for old, new in pairs}
