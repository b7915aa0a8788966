"""Every panel of the dashboards gets data from a real Prometheus, by old names and by new ones."""

import json
import shutil
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshwright.fleet.health.dashboards import DASHBOARD_TITLES, build_dashboard
from meshwright.fleet.sources.prometheus.metric_names import FAULT_METRICS, METRIC_FIELDS
from tests.real.prometheus_server import prometheus

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("prometheus") and shutil.which("promtool")),
        reason="needs Debian's prometheus",
    ),
]

BEGIN_S, STEP_S, STEPS = 1_790_000_000, 30, 241
END_S = BEGIN_S + STEP_S * (STEPS - 1)
OTHERS = (
    'node_infiniband_link_downed_total{instance="n1",device="mlx5_0",port="1"}',
    'node_infiniband_symbol_error_total{instance="n1",device="mlx5_0",port="1"}',
    'mw_job_step_seconds{hpc_job="7"}',
    'mw_job_step_seconds_total{hpc_job="7"}',
    'mw_job_data_wait_seconds_total{hpc_job="7"}',
    'mw_job_mfu_ratio{hpc_job="7"}',
    'mw_job_tokens_per_second{hpc_job="7"}',
    'mw_job_step{hpc_job="7"}',
    'mw_job_hangs_total{hpc_job="7"}',
    'meshwright_fleet_gpu_hours{bucket="idle"}',
    'ALERTS{alertname="GPUTooHot",alertstate="firing",source="meshwright"}',
)


def series(label: str, name_at: int) -> Iterator[tuple[str, float, bool]]:
    """Name all series of a fleet, with their value, and whether they only grow.

    n1 has dcgm-exporter, n2 our exporter, n3 both; two GPUs each.
    """
    for field in METRIC_FIELDS:
        theirs = [one for one in field.names if one.name.startswith("DCGM_")]
        name = theirs[min(name_at, len(theirs) - 1)]
        share = 50.0 if name.scale in (0.01, None) else 0.5
        value = share if field.max_valid == 1.0 else 30.0
        for node in ("n1", "n3"):
            for gpu in "01":
                text = f'{name.name}{{{label}="{node}",gpu="{gpu}",instance="{node}:9400"}}'
                yield text, value, name.is_counter
        for name in field.names:
            if name.name.startswith("mw_"):
                for node in ("n2", "n3"):
                    for gpu in "01":
                        text = (
                            f'{name.name}{{hostname="{node}",gpu="{gpu}",instance="{node}:9421"}}'
                        )
                        yield text, 0.5 if field.max_valid == 1.0 else 30.0, False
    for fault in FAULT_METRICS:
        xid = ',xid="79"' if fault.names[0].startswith("DCGM_EXP") else ""
        name_ = fault.names[min(name_at, len(fault.names) - 1)]
        yield f'{name_}{{{label}="n1",gpu="0"{xid}}}', 79.0, fault.value_kind == "counter"
    for text in OTHERS:
        yield text, 0.4, "_total" in text


def asked(url: str, expr: str) -> list[dict[str, Any]]:
    words = urllib.parse.urlencode({"query": expr, "time": END_S})
    with urllib.request.urlopen(f"{url}/api/v1/query?{words}", timeout=30) as reply:
        found = json.load(reply)
    return list(found["data"]["result"])


@pytest.mark.parametrize(("label", "name_at"), [("Hostname", 0), ("hostname", 1)])
def test_every_panel_has_data(tmp_path: Path, label: str, name_at: int) -> None:
    times = [float(BEGIN_S + STEP_S * at) for at in range(STEPS)]
    samples = {
        name: [(time_s, value * at if grows else value) for at, time_s in enumerate(times)]
        for name, value, grows in series(label, name_at)
    }
    values: dict[str, list[float]] = {}
    with prometheus(tmp_path, samples) as server:
        for name in DASHBOARD_TITLES:
            for panel in build_dashboard(name, label)["panels"]:
                for target in panel["targets"]:
                    found = asked(server.url, target["expr"].replace("$node", "n1|n2|n3"))
                    values.setdefault(panel["title"], []).extend(
                        float(one["value"][1]) for one in found
                    )
                    assert found, (panel["title"], target["expr"])
        one = asked(server.url, build_dashboard("node", label)["panels"][1]["targets"][0]["expr"]
                    .replace("$node", "n2"))  # fmt: skip
    assert values["GPUs measured"] == [6.0]
    assert values["GPUs that idle"] == [0.0, 6.0]
    assert values["Utilization"] == [0.5] * 6
    assert values["Power"] == [6 * 30.0]
    assert [each["metric"][label] for each in one] == ["n2", "n2"]
