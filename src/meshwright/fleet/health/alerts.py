"""Alerts for Prometheus and Alertmanager, from dcgm-exporter's and node-exporter's metrics.

Where a metric has an old and a new name both are asked for; what a fleet does not export makes no
alert. Xids of programs raise none.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import yaml

from meshwright.fleet.health.hooks.hook_files import NODE_CONDITION
from meshwright.fleet.health.xids import list_drain_xids
from meshwright.fleet.sources.prometheus.metric_names import (
    FAULT_METRICS,
    METRIC_FIELDS,
    PORT_FAULT_METRICS,
)

_NODE: Final = "{{ if $labels.Hostname }}{{ $labels.Hostname }}{{ else if $labels.hostname }}" \
    "{{ $labels.hostname }}{{ else }}{{ $labels.instance }}{{ end }}"  # fmt: skip
_GPU: Final = f"GPU {{{{ $labels.gpu }}}} of {_NODE}"


class AlertRule(NamedTuple):
    """One alert."""

    name: str
    expr: str
    for_: str
    """How long it must hold."""
    severity: str
    summary: str
    runbook: str


def find_dcgm_names(text: str, column: str = "") -> tuple[str, ...]:
    """Return dcgm-exporter's names of a fault told by this text, or of a column."""
    if column:
        found = next(field for field in METRIC_FIELDS if field.column == column)
        return tuple(one.name for one in found.names if one.name.startswith("DCGM_"))
    return next(one.names for one in (*FAULT_METRICS, *PORT_FAULT_METRICS) if one.text == text)


def build_or_query(names: tuple[str, ...], form: Callable[[str], str]) -> str:
    """Return a query for whichever of the names there is."""
    return " or ".join(form(name) for name in names)


def build_xid_query(codes: tuple[int, ...]) -> str:
    """Return a query for GPUs whose last Xid became one of these; the gauge itself never falls."""
    last = " or ".join(
        f"({name} == {code} unless {name} offset 15m == {code})"
        for name in ("DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_XID_ERROR")
        for code in codes
    )
    among = "|".join(map(str, codes))
    counted = f'DCGM_EXP_XID_ERRORS_COUNT{{xid=~"{among}"}} > 0'
    total = f'increase(DCGM_EXP_XID_ERRORS_TOTAL{{xid=~"{among}"}}[15m]) > 0'
    return f"{last} or {counted} or {total}"


def build_bit_query(name: str, mask: int) -> str:
    """Return a query for whether a bit of a gauge is set; PromQL has no bitwise operators."""
    return f"floor({name} / {mask}) % 2 == 1"


def _rise(text: str, over: str, more_than: float) -> str:
    return build_or_query(
        find_dcgm_names(text), lambda name: f"increase({name}[{over}]) > {more_than:g}"
    )


def _nvlink(text: str, more_than: float) -> str:
    names = next(one.names for one in FAULT_METRICS if one.text == text and one.kind == "nvlink")
    return build_or_query(names, lambda name: f"increase({name}[1h]) > {more_than:g}")


def _pcie(more_than: float) -> str:
    names = next(one.names for one in FAULT_METRICS if one.kind == "pcie")
    return build_or_query(names, lambda name: f"increase({name}[1h]) > {more_than:g}")


_THROTTLE: Final = find_dcgm_names("", "throttle")
_TEMPERATURE: Final = find_dcgm_names("", "temperature_c")


def list_alerts() -> tuple[AlertRule, ...]:
    """Return all alerts."""
    return (
        AlertRule(
            "GPUHardwareXid", build_xid_query(list_drain_xids()), "0m", "critical",
            f"{_GPU} reported an Xid of its hardware",
            "drain the node; mw fleet health says which Xid it was and what mends it",
        ),
        AlertRule(
            "GPURowRemapFailed", build_or_query(find_dcgm_names("a row could not be remapped"),
                                        lambda name: f"{name} > 0"), "0m", "critical",
            f"{_GPU} cannot set broken memory aside", "drain the node and have the GPU replaced",
        ),
        AlertRule(
            "GPURowRemapPending", build_or_query(find_dcgm_names("rows wait for a reset"),
                                         lambda name: f"{name} > 0"), "1h", "warning",
            f"{_GPU} waits for a reset to put spare memory in place",
            "reset the GPU when the node is next empty: nvidia-smi -r",
        ),
        AlertRule(
            "GPUUncorrectedMemory", _rise("uncorrected errors of memory", "1h", 0), "0m", "warning",
            f"{_GPU} met memory errors that ECC could not correct",
            "the job there may have failed; reset the GPU when the node is next empty",
        ),
        AlertRule(
            "GPULost",
            build_or_query(_TEMPERATURE, lambda name: (
                f"count by (Hostname, hostname, instance) ({name} offset 1h) > "
                f"count by (Hostname, hostname, instance) ({name})")), "10m", "critical",
            f"{_NODE} has fewer GPUs than an hour ago",
            "drain the node; look for Xid 79 in its kernel log and reboot it",
        ),
        AlertRule(
            "GPUTooHot",
            build_or_query(_THROTTLE,
            lambda name: f"({build_bit_query(name, 0x20)}) or ({build_bit_query(name, 0x40)})"),
            "15m", "warning", f"{_GPU} is slowed by heat",
            "check fans, filters and inlet temperature of the node",
        ),
        AlertRule(
            "GPUPowerBrake",
            build_or_query(_THROTTLE,
            lambda name: f"({build_bit_query(name, 0x80)}) or ({build_bit_query(name, 0x08)})"),
            "15m", "warning", f"{_GPU} is slowed by the power brake or its board",
            "check power supplies and their feeds",
        ),
        AlertRule(
            "NVLinkErrors",
            " or ".join((_nvlink("replays", 100), _nvlink("recoveries", 0),
                         _nvlink("data checksums wrong", 100))), "0m", "warning",
            f"NVLink of {_GPU} repeats what it sends",
            "nvidia-smi nvlink -e names the link; check the node before it gets a large job",
        ),
        AlertRule(
            "GPUPCIeReplays", _pcie(100), "0m", "warning",
            f"{_GPU} repeats what it sends to its host",
            "check that the GPU sits well and its link has its full width: nvidia-smi -q -d PCIE",
        ),
        AlertRule(
            "InfiniBandLinkDown", _rise("link went down", "1h", 0), "0m", "warning",
            f"port {{{{ $labels.device }}}}/{{{{ $labels.port }}}} of {_NODE} went down",
            "iblinkinfo names the other end; clean or replace cable and transceiver",
        ),
        AlertRule(
            "InfiniBandErrors",
            " or ".join(_rise(text, "1h", 100) for text in (
                "symbol errors", "packets received with errors", "link integrity errors")),
            "0m", "warning",
            f"port {{{{ $labels.device }}}}/{{{{ $labels.port }}}} of {_NODE} has errors",
            "ibqueryerrors names the port; clean or replace cable and transceiver",
        ),
        AlertRule(
            "GPUExporterDown", 'up{job=~".*(dcgm|gpu).*"} == 0', "15m", "warning",
            "GPUs of {{ $labels.instance }} are not measured",
            "see whether the node is up, and its exporter runs",
        ),
        AlertRule(
            "NodeGPUUnhealthy",
            f'kube_node_status_condition{{condition="{NODE_CONDITION}",status="true"}} == 1', "5m",
            "critical", "{{ $labels.node }} is not fit for jobs on GPUs",
            "kubectl describe node says why; cordon and drain it",
        ),
        AlertRule(
            "FleetIngestStopped",
            'time() - meshwright_fleet_known_until_seconds{table="gpu_samples"} > 7200', "10m",
            "warning", "the fleet's store has learned nothing for two hours",
            "see whether mw fleet ingest --every runs, and what it says",
        ),
    )  # fmt: skip


def render_rules() -> str:
    """Return the alerts as a file of rules for Prometheus."""
    group: dict[str, Any] = {
        "name": "meshwright-gpu-health",
        "rules": [
            {
                "alert": one.name,
                "expr": one.expr,
                "for": one.for_,
                "labels": {"severity": one.severity, "source": "meshwright"},
                "annotations": {"summary": one.summary, "description": one.runbook},
            }
            for one in list_alerts()
        ],
    }
    return yaml.safe_dump({"groups": [group]}, sort_keys=False, width=1_000_000)
