"""Dashboards for Grafana, made from one list of panels over metrics of dcgm-exporter and ours."""

import json
from functools import partial
from typing import Any, Final, NamedTuple

from meshwright.fleet.sources.prometheus.metric_names import (
    FAULT_METRICS,
    METRIC_FIELDS,
    MetricName,
)

SCHEMA_VERSION: Final = 39
"""Of Grafana 10 and 11; later ones read it and bring it up to date."""
_WIDTH: Final = 24
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_OUR_LABEL: Final = "hostname"
"""What names nodes in metrics of `mw fleet exporter`."""


class PanelQuery(NamedTuple):
    """What a panel asks for."""

    expr: str
    legend: str = ""


class Panel(NamedTuple):
    """One panel, and the dashboards it is on."""

    title: str
    kind: str
    """Of Grafana: timeseries, stat, table, bargauge."""
    unit: str
    queries: tuple[PanelQuery, ...]
    dashboards: tuple[str, ...]
    width: int = 12
    description: str = ""
    maximum: float | None = None
    """The most there can be, for axes."""


DASHBOARD_TITLES: Final = {
    "fleet": "Meshwright: GPU fleet",
    "node": "Meshwright: GPUs of a node",
    "health": "Meshwright: GPU health",
    "jobs": "Meshwright: training jobs",
}


class _Asking(NamedTuple):
    """Queries for metrics by whichever of their names there is."""

    label: str
    """What names nodes: exporters differ."""

    @property
    def only(self) -> str:
        """Select the nodes that are chosen on the page."""
        return f'{{{self.label}=~"$node"}}'

    @property
    def each(self) -> str:
        """Name a GPU in a legend."""
        return f"{{{{{self.label}}}}} GPU {{{{gpu}}}}"

    def gauge(self, column: str, *, chosen: bool = False) -> str:
        """Ask for a column in our unit, of all nodes or of those that are chosen."""
        names = next(field.names for field in METRIC_FIELDS if field.column == column)
        theirs = [one for one in names if one.name.startswith("DCGM_")]
        asked = " or ".join(_scaled(one, self.only if chosen else "") for one in theirs)
        for one in names:
            if one.name.startswith("mw_"):
                # Where a node has both exporters, its GPUs count once.
                asked += f" or on ({self.label}, gpu) {self._ours(one, chosen=chosen)}"
        return asked

    def _ours(self, name: MetricName, *, chosen: bool) -> str:
        asked = _scaled(name, f'{{{_OUR_LABEL}=~"$node"}}' if chosen else "")
        if self.label == _OUR_LABEL:
            return asked
        return f'label_replace({asked}, "{self.label}", "$1", "{_OUR_LABEL}", "(.+)")'

    def errors(self, kind: str) -> tuple[PanelQuery, ...]:
        """Ask how often each fault of a kind came in an hour."""
        return tuple(
            PanelQuery(
                " or ".join(f"increase({name}{self.only}[1h]) > 0" for name in one.names),
                f"{self.each}: {one.text}",
            )
            for one in FAULT_METRICS
            if one.kind == kind and one.value_kind == "counter"
        )


def _scaled(name: MetricName, only: str) -> str:
    asked = f"rate({name.name}{only}[5m])" if name.is_counter else f"{name.name}{only}"
    if name.scale is None:
        # Any value above one tells that all are percentages.
        return f"({asked} * 0.01 and on () max(max_over_time({name.name}[1h])) > 1.02 or {asked})"
    return asked if name.scale == 1.0 else f"{asked} * {name.scale:g}"


_JOB: Final = "{{hpc_job}}"


def list_panels(label: str = "Hostname") -> tuple[Panel, ...]:
    """Return all panels; `label` is what names nodes."""
    fleet, node, health, jobs = ("fleet",), ("node",), ("health",), ("jobs",)
    asking = _Asking(label)
    gauge, chosen = asking.gauge, partial(asking.gauge, chosen=True)
    errors, each, only = asking.errors, asking.each, asking.only
    return (
        Panel("GPUs measured", "stat", "none",
              (PanelQuery(f"count({gauge('gpu_util')})"),), fleet, 6),
        Panel("GPUs with a kernel resident", "stat", "percentunit",
              (PanelQuery(f"avg({gauge('gpu_util')})"),), fleet, 6,
              "Says that something ran, not that it ran well."),
        Panel("Tensor cores active", "stat", "percentunit",
              (PanelQuery(f"avg({gauge('tensor_active')})"),), fleet, 6,
              "The mean over all GPUs, idle ones included."),
        Panel("Power", "stat", "watt", (PanelQuery(f"sum({gauge('power_w')})"),), fleet, 6),
        Panel("How busy GPUs are", "timeseries", "percentunit",
              (PanelQuery(f"avg({gauge('engine_active')})", "any engine"),
               PanelQuery(f"avg({gauge('sm_active')})", "SMs"),
               PanelQuery(f"avg({gauge('tensor_active')})", "tensor cores"),
               PanelQuery(f"avg({gauge('dram_active')})", "memory")), fleet, 12, maximum=1.0),
        Panel("GPUs that idle", "timeseries", "none",
              (PanelQuery(f"count(({gauge('gpu_util')}) == 0) or vector(0)", "at 0 %"),
               PanelQuery(f"count(({gauge('gpu_util')}) > 0) or vector(0)", "at work")), fleet),
        Panel("Where GPU-hours go", "timeseries", "h",
              (PanelQuery("meshwright_fleet_gpu_hours", "{{bucket}}"),), fleet, 24,
              "From mw fleet serve; buckets sum to all hours there were."),
        Panel("Memory in use", "timeseries", "bytes", (PanelQuery(chosen("memory_used"), each),),
        node),
        Panel("Utilization", "timeseries", "percentunit", (PanelQuery(chosen("gpu_util"), each),),
        node,
              maximum=1.0),
        Panel("Tensor cores", "timeseries", "percentunit",
              (PanelQuery(chosen("tensor_active"), each),), node, maximum=1.0),
        Panel("Power of each GPU", "timeseries", "watt", (PanelQuery(chosen("power_w"), each),),
        node),
        Panel("SM clock", "timeseries", "rotmhz",
              (PanelQuery(chosen("sm_clock_mhz"), each),), ("node", "health")),
        Panel("Temperature", "timeseries", "celsius",
              (PanelQuery(chosen("temperature_c"), each),), ("node", "health")),
        Panel("NVLink", "timeseries", "Bps",
              (PanelQuery(chosen("nvlink_tx"), each + " out"),
               PanelQuery(chosen("nvlink_rx"), each + " in")), node),
        Panel("PCI Express", "timeseries", "Bps",
              (PanelQuery(chosen("pcie_tx"), each + " out"),
               PanelQuery(chosen("pcie_rx"), each + " in")), node),
        Panel("Alerts that fire", "table", "none",
              (PanelQuery('ALERTS{source="meshwright",alertstate="firing"}'),), health, 24),
        Panel("Last Xid", "table", "none",
              (PanelQuery(f"DCGM_FI_DEV_XID_ERRORS{only} > 0 or DCGM_FI_DEV_XID_ERROR{only} > 0"),),
              health, 12, "The last Xid of each GPU, however old: the gauge never falls. "
              "mw fleet health --xid N tells what it means."),
        Panel("Xids in the last minutes", "timeseries", "none",
              (PanelQuery(f"DCGM_EXP_XID_ERRORS_COUNT{only}", each + " Xid {{xid}}"),), health),
        Panel("Uncorrected memory errors an hour", "timeseries", "none",
              errors("ecc"), health),
        Panel("Corrected memory errors an hour", "timeseries", "none",
              errors("ecc_corrected"), health),
        Panel("Rows remapped an hour", "timeseries", "none",
              errors("row_remap"), health),
        Panel("NVLink errors an hour", "timeseries", "none", errors("nvlink"),
              health),
        Panel("PCI Express replays an hour", "timeseries", "none",
              errors("pcie"), health),
        Panel("InfiniBand errors an hour", "timeseries", "none",
              (PanelQuery("increase(node_infiniband_link_downed_total[1h]) > 0",
                     "{{instance}} {{device}} down"),
               PanelQuery("increase(node_infiniband_symbol_error_total[1h]) > 0",
                     "{{instance}} {{device}} symbols")), health),
        Panel("Why clocks are held back", "timeseries", "none",
              (PanelQuery(chosen("throttle"), each),),
              health, 12, "Bits: 1 idle, 4 power cap, 8 and 128 power brake, 32 and 64 heat."),
        Panel("Time of a step", "timeseries", "s", (PanelQuery("mw_job_step_seconds", _JOB),),
        jobs),
        Panel("Share of steps that waits for data", "timeseries", "percentunit",
              (PanelQuery("rate(mw_job_data_wait_seconds_total[5m]) / "
                     "rate(mw_job_step_seconds_total[5m])", _JOB),), jobs, maximum=1.0),
        Panel("Model FLOPs utilization", "timeseries", "percentunit",
              (PanelQuery("mw_job_mfu_ratio", _JOB),), jobs, maximum=1.0),
        Panel("Tokens a second", "timeseries", "none",
              (PanelQuery("mw_job_tokens_per_second", _JOB),), jobs),
        Panel("Steps done", "timeseries", "none", (PanelQuery("mw_job_step", _JOB),), jobs),
        Panel("Times without a step, in an hour", "timeseries", "none",
              (PanelQuery("increase(mw_job_hangs_total[1h])", _JOB),), jobs,
              description="From mw watch. A job that stands still holds its GPUs."),
    )  # fmt: skip


def build_dashboard(name: str, label: str = "Hostname") -> dict[str, Any]:
    """Return one dashboard as Grafana imports it; `label` is what names nodes."""
    placed, x, y, last = [], 0, 0, 0
    for number, panel in enumerate(
        (one for one in list_panels(label) if name in one.dashboards), start=1
    ):
        height = 4 if panel.kind == "stat" else 8
        if x + panel.width > _WIDTH:
            x, y = 0, y + last
        place = {"h": height, "w": panel.width, "x": x, "y": y}
        placed.append(_panel(panel, number, place))
        x, last = x + panel.width, height
    return {
        "id": None,
        "uid": f"meshwright-{name}",
        "title": DASHBOARD_TITLES[name],
        "tags": ["meshwright", "gpu"],
        "timezone": "browser",
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "1m",
        "time": {"from": "now-6h", "to": "now"},
        "timepicker": {},
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": _variables(name, label)},
        "panels": placed,
    }


def render_dashboards(label: str = "Hostname") -> dict[str, str]:
    """Return all dashboards as JSON, by the name of their file."""
    return {
        f"{name}.json": json.dumps(build_dashboard(name, label), indent=2) + "\n"
        for name in DASHBOARD_TITLES
    }


def _variables(name: str, label: str) -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource",
              "query": "prometheus", "hide": 0, "refresh": 1}  # fmt: skip
    if name not in ("node", "health"):
        return [source]
    # Whichever name the first metric has tells the nodes.
    first = "|".join(one.name for one in METRIC_FIELDS[0].names)
    query = f'label_values({{__name__=~"{first}"}}, {label})'
    everything = {"text": ["All"], "value": ["$__all"], "selected": True}
    node = {"name": "node", "label": "Node", "type": "query", "datasource": _SOURCE,
            "query": {"query": query, "refId": "nodes"}, "refresh": 2,
            "sort": 1, "multi": True, "includeAll": True, "allValue": ".*", "hide": 0,
            "current": everything}  # fmt: skip
    return [source, node]


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel.kind),
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": _SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend or "__auto",
                "instant": panel.kind == "table",
                "range": panel.kind != "table",
                "format": "table" if panel.kind == "table" else "time_series",
            }
            for at, query in enumerate(panel.queries)
        ],
    }


def _options(kind: str) -> dict[str, Any]:
    if kind == "stat":
        return {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                "colorMode": "value", "graphMode": "area"}  # fmt: skip
    if kind == "timeseries":
        return {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                "tooltip": {"mode": "multi", "sort": "desc"}}  # fmt: skip
    return {"showHeader": True}
