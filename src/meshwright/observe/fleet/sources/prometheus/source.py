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
from meshwright.observe.fleet.sources.prometheus.asking import Fleet, Slice
from meshwright.observe.fleet.sources.prometheus.client import Prometheus
from meshwright.observe.fleet.sources.prometheus.credentials import credentials
from meshwright.observe.fleet.sources.prometheus.faults import events
from meshwright.observe.fleet.sources.prometheus.gpu_samples import gpu_samples, has_gpus
from meshwright.observe.fleet.sources.prometheus.grid import Grid, grids
from meshwright.observe.fleet.sources.prometheus.holding import READ_AGAIN_S, Holding, seen
from meshwright.observe.fleet.sources.prometheus.hosts import (
    has_hosts,
    instance_names,
    node_samples,
)
from meshwright.observe.fleet.sources.prometheus.labels import Naming
from meshwright.observe.fleet.sources.prometheus.names import FIELDS
from meshwright.observe.fleet.sources.prometheus.progress import progress
from meshwright.observe.fleet.sources.source import Asked, Batch
from meshwright.observe.fleet.tables import HELD, JOBS, SAMPLES

OPTIONS = ("token_file", "token_env", "user", "password_file", "password_env", "tenant", "selector",
    "node_label", "domain", "renames", "settle_s")  # fmt: skip
MOST_ROWS = 250_000
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
        self, server: Prometheus, asked: Asked, now: Callable[[], float] = time.time
    ) -> None:
        self._server, self._asked, self._now = server, asked, now
        self._notes: list[str] = []
        self._settle_s = _number(asked.options, "settle_s", _SETTLE_S)
        self._naming = Naming(
            asked.options.get("node_label", ""),
            asked.options.get("domain", ""),
            _renames(asked.options),
        )

    @property
    def name(self) -> str:
        """Where it is, without credentials."""
        selector = self._asked.options.get("selector", "")
        return f"prometheus {self._server.url}" + (f" {{{selector}}}" if selector else "")

    def batches(self, cursor: str | None = None) -> Iterator[Batch]:
        """Give rows slice by slice."""
        try:
            yield from self._batches(_read_cursor(cursor))
        finally:
            self._server.close()

    def _batches(self, left: _Cursor | None) -> Iterator[Batch]:
        asked = self._asked
        until_s = self._now() - self._settle_s if asked.until_s is None else asked.until_s
        since_s = asked.since_s
        if left is not None:
            since_s = max(since_s or 0.0, left.until_s - READ_AGAIN_S)
        if since_s is None:
            since_s = self._oldest(until_s)
        fleet, count = self._look(since_s, until_s)
        if not (has_gpus(fleet.names) or has_hosts(fleet.names)):
            note = f"{self._server.url} has no metrics of GPUs or nodes in this time"
            self._notes.append(note)
        columns = sum(any(one.text in fleet.names for one in each.names) for each in FIELDS)
        asked_for = columns * count * (until_s - since_s) / asked.step_s
        if asked_for > _MUCH and asked.step_s < 300:
            self._notes.append(
                f"{asked_for:.1g} samples are asked for; --step 5min lets the server roll them up"
            )
        if self._notes:
            yield Batch("samples", SAMPLES.empty_table(), None, tuple(self._notes))
            self._notes.clear()
        left = left or _Cursor(since_s, {}, None, {}, {})
        holding = Holding(left.holding)
        slices = list(grids(since_s, until_s, asked.step_s, max(1, min(5_000, _CELLS // count))))
        for grid in slices:
            yield from self._slice(fleet, grid, holding, last=grid is slices[-1])
            left = left._replace(until_s=grid.end_s, holding=holding.kept())
            # All rows of the slice came before this: from here another ingest goes on.
            yield Batch("held", HELD.empty_table(), json.dumps(left._asdict()))
        yield from self._jobs(fleet, since_s, until_s, left)

    def _slice(self, fleet: Fleet, grid: Grid, holding: Holding, *, last: bool) -> Iterator[Batch]:
        cut = Slice(self._server, fleet, grid)
        samples, notes = gpu_samples(cut)
        yield from _pieces("samples", samples, notes)
        if has_hosts(fleet.names):
            yield from _pieces("node_samples", node_samples(cut), ())
        yield Batch("events", events(cut))
        yield Batch("progress", progress(cut))
        gpus, held = holding.add(seen(cut), cut, _memory(samples), last=last)
        yield Batch("gpus", gpus)
        yield Batch("held", held, None, self._server.notes())

    def _jobs(self, fleet: Fleet, since_s: float, until_s: float, left: _Cursor) -> Iterator[Batch]:
        if "kube_pod_status_phase" not in fleet.names and "kube_node_info" not in fleet.names:
            return
        from meshwright.observe.fleet.sources.kubernetes.state_metrics import (
            Known,
            read_state_metrics,
        )

        if left.pods_until_s is not None:
            since_s = min(left.pods_until_s - READ_AGAIN_S, until_s)
        before = Known(left.nodes, left.names)
        found, known = read_state_metrics(self._server, fleet, since_s, until_s, before)
        for table, rows in found:
            yield Batch(table, rows, None, self._server.notes())
        left = left._replace(pods_until_s=until_s, **known._asdict())
        yield Batch("jobs", JOBS.empty_table(), json.dumps(left._asdict()))

    def _look(self, since_s: float, until_s: float) -> tuple[Fleet, int]:
        """Find which metrics there are, how often they are scraped, and of how many GPUs."""
        names = frozenset(self._server.names(_WANTED, since_s, until_s))
        fleet = Fleet("", names, self._asked.options.get("selector", ""), self._naming)
        fleet = fleet._replace(cluster=self._cluster(fleet, since_s, until_s))
        known = instance_names(self._server, fleet, since_s, until_s)
        fleet = fleet._replace(naming=self._naming._replace(instances=known))
        return self._paced(fleet, since_s, until_s)

    def _cluster(self, fleet: Fleet, since_s: float, until_s: float) -> str:
        """Find the name of the fleet; where a server holds several, say that they are mixed."""
        known = [one.text for each in FIELDS for one in each.names if one.text in fleet.names]
        metric = fleet.of(known[0] if known else _OF_HOSTS)
        found = sorted(self._server.values("cluster", metric, since_s, until_s) - {""})
        if len(found) > 1:
            self._notes.append(
                f"{self._server.url} holds the clusters {', '.join(found)}: they are read as one; "
                "read each with --cluster NAME --option selector='cluster=\"NAME\"'"
            )
        own = found[0] if len(found) == 1 else urlsplit(self._server.url).hostname
        return self._asked.cluster or own or "prometheus"

    def _paced(self, fleet: Fleet, since_s: float, until_s: float) -> tuple[Fleet, int]:
        """Find how far samples are apart and how many series a metric has.

        Several moments are tried, because exporters fall silent.
        """
        known = [one.text for each in FIELDS for one in each.names if one.text in fleet.names]
        counted = f"count_over_time({fleet.of(known[0] if known else _OF_HOSTS)}[10m])"
        most, series = 0.0, 0.0
        for at_s in np.linspace(since_s, until_s, _LOOKS + 1)[1:]:
            for each in self._server.query(f"max({counted})", at_s):
                most = max(most, float(each.values[-1]))
            for each in self._server.query(f"count({counted})", at_s):
                series = max(series, float(each.values[-1]))
        scrape_s = max(1.0, float(round(600 / most))) if most else fleet.scrape_s
        return fleet._replace(scrape_s=scrape_s), max(1, int(series))

    def _oldest(self, until_s: float) -> float:
        """Find how far back samples go, to the next power of two in days.

        All powers are tried: a fleet may have been silent for a while.
        """
        oldest = 1
        for power in range(_LONGEST_BACK.bit_length() - 1):
            at_s = until_s - 86400 * 2**power
            if self._server.names(_WANTED, at_s - 86400 * 2**power, at_s):
                oldest = 2 ** (power + 1)
        return until_s - 86400 * oldest


def open_source(where: str, asked: Asked) -> PrometheusSource:
    """Open the server at a URL as it is asked for."""
    unknown = sorted(set(asked.options) - set(OPTIONS))
    if unknown:
        fix = f"options of Prometheus are {', '.join(OPTIONS)}"
        raise InputError([Problem(f"--option {each}", "is not known", fix) for each in unknown])
    url = where.removeprefix("prometheus+")
    who = credentials(asked.token, asked.options)
    tenant = asked.options.get("tenant", "")
    server = Prometheus(url, who, ca_file=asked.ca_file, tenant=tenant, tell=asked.tell)
    return PrometheusSource(server, asked)


def _pieces(table: str, rows: pa.Table, notes: tuple[str, ...]) -> Iterator[Batch]:
    for first in range(0, max(rows.num_rows, 1), MOST_ROWS):
        yield Batch(table, rows.slice(first, MOST_ROWS), None, notes)


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
