"""Dashboards for Grafana, made from one list of panels over dcgm-exporter's metrics."""

import json
from typing import Any, Final, NamedTuple

from meshwright.observe.fleet.health.alerts import names_of
from meshwright.observe.fleet.sources.prometheus.names import FAULTS, FIELDS, Name

SCHEMA: Final = 39
"""Of Grafana 10 and 11; later ones read it and bring it up to date."""
_WIDTH: Final = 24
_SOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_ONLY: Final = '{NODE=~"$node"}'
"""NODE is put in place of the label that names nodes: exporters differ."""


class Query(NamedTuple):
    """What a panel asks for."""

    expr: str
    legend: str = ""


class Panel(NamedTuple):
    """One panel, and the dashboards it is on."""

    title: str
    kind: str
    """Of Grafana: timeseries, stat, table, bargauge."""
    unit: str
    queries: tuple[Query, ...]
    on: tuple[str, ...]
    wide: int = 12
    tells: str = ""
    top: float | None = None
    """The most there can be, for axes."""


TITLES: Final = {
    "fleet": "Meshwright: GPU fleet",
    "node": "Meshwright: GPUs of a node",
    "health": "Meshwright: GPU health",
}


def _gauge(column: str, only: str = _ONLY) -> str:
    """Query a metric in our unit, by whichever of its names there is."""
    names = next(field.names for field in FIELDS if field.column == column)
    known = [one for one in names if one.text.startswith("DCGM_") and one.scale is not None]
    return " or ".join(_scaled(one, only) for one in known)


def _scaled(name: Name, only: str) -> str:
    asked = f"rate({name.text}{only}[5m])" if name.counter else f"{name.text}{only}"
    return asked if name.scale == 1.0 else f"{asked} * {name.scale:g}"


def _errors(kind: str) -> str:
    names = [name for one in FAULTS if one.kind == kind and one.how == "counter"
             for name in one.names]  # fmt: skip
    return " or ".join(f"increase({name}{_ONLY}[1h]) > 0" for name in names)


_EACH: Final = "{{NODE}} GPU {{gpu}}"


def panels() -> tuple[Panel, ...]:
    """Return all panels."""
    fleet, node, health = ("fleet",), ("node",), ("health",)
    return (
        Panel("GPUs measured", "stat", "none",
              (Query(f"count({_gauge('gpu_util', '')})"),), fleet, 6),
        Panel("GPUs with a kernel resident", "stat", "percentunit",
              (Query(f"avg({_gauge('gpu_util', '')})"),), fleet, 6,
              "Says that something ran, not that it ran well."),
        Panel("Tensor cores active", "stat", "percentunit",
              (Query(f"avg({_gauge('tensor_active', '')})"),), fleet, 6,
              "The mean over all GPUs, idle ones included."),
        Panel("Power", "stat", "watt", (Query(f"sum({_gauge('power_w', '')})"),), fleet, 6),
        Panel("How busy GPUs are", "timeseries", "percentunit",
              (Query(f"avg({_gauge('engine_active', '')})", "any engine"),
               Query(f"avg({_gauge('sm_active', '')})", "SMs"),
               Query(f"avg({_gauge('tensor_active', '')})", "tensor cores"),
               Query(f"avg({_gauge('dram_active', '')})", "memory")), fleet, 12, top=1.0),
        Panel("GPUs that idle", "timeseries", "none",
              (Query(f"count(({_gauge('gpu_util', '')}) == 0)", "at 0 %"),
               Query(f"count(({_gauge('gpu_util', '')}) > 0)", "at work")), fleet),
        Panel("Where GPU-hours go", "timeseries", "h",
              (Query("meshwright_fleet_gpu_hours", "{{bucket}}"),), fleet, 24,
              "From mw fleet serve; buckets sum to all hours there were."),
        Panel("Memory in use", "timeseries", "bytes", (Query(_gauge("memory_used"), _EACH),), node),
        Panel("Utilisation", "timeseries", "percentunit", (Query(_gauge("gpu_util"), _EACH),), node,
              top=1.0),
        Panel("Tensor cores", "timeseries", "percentunit",
              (Query(_gauge("tensor_active"), _EACH),), node, top=1.0),
        Panel("Power of each GPU", "timeseries", "watt", (Query(_gauge("power_w"), _EACH),), node),
        Panel("SM clock", "timeseries", "rotmhz",
              (Query(_gauge("sm_clock_mhz"), _EACH),), ("node", "health")),
        Panel("Temperature", "timeseries", "celsius",
              (Query(_gauge("temperature_c"), _EACH),), ("node", "health")),
        Panel("NVLink", "timeseries", "Bps",
              (Query(_gauge("nvlink_tx"), _EACH + " out"),
               Query(_gauge("nvlink_rx"), _EACH + " in")), node),
        Panel("PCI Express", "timeseries", "Bps",
              (Query(_gauge("pcie_tx"), _EACH + " out"),
               Query(_gauge("pcie_rx"), _EACH + " in")), node),
        Panel("Alerts that fire", "table", "none",
              (Query('ALERTS{source="meshwright",alertstate="firing"}'),), health, 24),
        Panel("Last Xid", "table", "none",
              (Query(f"DCGM_FI_DEV_XID_ERRORS{_ONLY} > 0 or DCGM_FI_DEV_XID_ERROR{_ONLY} > 0"),),
              health, 12, "The last Xid of each GPU, however old: the gauge never falls. "
              "mw fleet health --xid N tells what it means."),
        Panel("Xids in the last minutes", "timeseries", "none",
              (Query(f"DCGM_EXP_XID_ERRORS_COUNT{_ONLY}", _EACH + " Xid {{xid}}"),), health),
        Panel("Uncorrected memory errors an hour", "timeseries", "none",
              (Query(_errors("ecc"), _EACH),), health),
        Panel("Corrected memory errors an hour", "timeseries", "none",
              (Query(_errors("ecc_corrected"), _EACH),), health),
        Panel("Rows remapped an hour", "timeseries", "none",
              (Query(_errors("row_remap"), _EACH),), health),
        Panel("NVLink errors an hour", "timeseries", "none", (Query(_errors("nvlink"), _EACH),),
              health),
        Panel("PCI Express replays an hour", "timeseries", "none",
              (Query(_errors("pcie"), _EACH),), health),
        Panel("InfiniBand errors an hour", "timeseries", "none",
              (Query("increase(node_infiniband_link_downed_total[1h]) > 0",
                     "{{instance}} {{device}} down"),
               Query("increase(node_infiniband_symbol_error_total[1h]) > 0",
                     "{{instance}} {{device}} symbols")), health),
        Panel("Why clocks are held back", "timeseries", "none",
              (Query(" or ".join(f"{name}{_ONLY}" for name in names_of("", "throttle")), _EACH),),
              health, 12, "Bits: 1 idle, 4 power cap, 8 and 128 power brake, 32 and 64 heat."),
    )  # fmt: skip


def dashboard(name: str, label: str = "Hostname") -> dict[str, Any]:
    """Return one dashboard as Grafana imports it; `label` is what names nodes."""
    placed, x, y, last = [], 0, 0, 0
    for number, panel in enumerate((one for one in panels() if name in one.on), start=1):
        height = 4 if panel.kind == "stat" else 8
        if x + panel.wide > _WIDTH:
            x, y = 0, y + last
        place = {"h": height, "w": panel.wide, "x": x, "y": y}
        placed.append(_panel(panel, number, place, label))
        x, last = x + panel.wide, height
    return {
        "id": None,
        "uid": f"meshwright-{name}",
        "title": TITLES[name],
        "tags": ["meshwright", "gpu"],
        "timezone": "browser",
        "schemaVersion": SCHEMA,
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


def dashboards(label: str = "Hostname") -> dict[str, str]:
    """Return all dashboards as JSON, by the name of their file."""
    return {f"{name}.json": json.dumps(dashboard(name, label), indent=2) + "\n" for name in TITLES}


def _variables(name: str, label: str) -> list[dict[str, Any]]:
    source = {"name": "datasource", "label": "Data source", "type": "datasource",
              "query": "prometheus", "hide": 0, "refresh": 1}  # fmt: skip
    if name == "fleet":
        return [source]
    # Either name of the first metric tells the nodes.
    query = f'label_values({{__name__=~"{"|".join(names_of("", "gpu_util"))}"}}, {label})'
    everything = {"text": ["All"], "value": ["$__all"], "selected": True}
    node = {"name": "node", "label": "Node", "type": "query", "datasource": _SOURCE,
            "definition": query, "query": {"query": query, "refId": "nodes"}, "refresh": 2,
            "sort": 1, "multi": True, "includeAll": True, "allValue": ".*", "hide": 0,
            "current": everything}  # fmt: skip
    return [source, node]


def _panel(panel: Panel, number: int, place: dict[str, int], label: str) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.top is not None:
        defaults["max"] = panel.top
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.tells,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel.kind),
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": _SOURCE,
                "expr": query.expr.replace("NODE=~", f"{label}=~"),
                "legendFormat": query.legend.replace("{{NODE}}", f"{{{{{label}}}}}") or "__auto",
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
