"""Alerts and dashboards: promtool reads them, and rules fire for hardware and not for programs."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.fleet.health.alerts import list_alerts, render_rules
from meshwright.fleet.health.dashboards import DASHBOARD_TITLES, list_panels, render_dashboards

promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")


def ran(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["promtool", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_alerts_say_what_to_do() -> None:
    made = yaml.safe_load(render_rules())["groups"][0]["rules"]
    assert len({one["alert"] for one in made}) == len(made) == len(list_alerts())
    assert all(one["annotations"]["description"] for one in made)
    assert {one["labels"]["severity"] for one in made} == {"critical", "warning"}


@promtool
def test_promtool_reads_the_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(render_rules())
    assert f"{len(list_alerts())} rules found" in ran(tmp_path, "check", "rules", "rules.yml")


@promtool
def test_rules_fire_for_hardware_and_not_for_programs(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text(render_rules())

    def fires(name: str, at: str, *gpus: str) -> dict[str, Any]:
        labels = [{"gpu": gpu, "Hostname": "n1"} for gpu in gpus]
        known = {"severity": next(one.severity for one in list_alerts() if one.name == name)}
        return {"eval_time": at, "alertname": name,
                "exp_alerts": [{"exp_labels": one | known | {"source": "meshwright"},
                                "exp_annotations": _annotations(name, one)}
                               for one in labels]}  # fmt: skip

    def gpu(metric: str, number: int, values: str, extra: str = "") -> dict[str, str]:
        return {"series": f'{metric}{{gpu="{number}",Hostname="n1"{extra}}}', "values": values}

    series = [
        gpu("DCGM_FI_DEV_XID_ERRORS", 0, "0x29 79x60"),
        gpu("DCGM_FI_DEV_XID_ERRORS", 1, "0x29 31x60"),
        gpu("DCGM_FI_DEV_XID_ERRORS", 2, "119x90"),  # of before, and not told again
        gpu("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", 3, "4x90"),
        gpu("DCGM_FI_DEV_CLOCK_THROTTLE_REASONS", 4, "68x90"),  # 0x44: power cap and heat
    ]
    text = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "alert_rule_test": [
            fires("GPUHardwareXid", "35m", "0"), fires("GPUHardwareXid", "80m"),
            fires("GPUTooHot", "30m", "4"), fires("GPUPowerBrake", "30m"),
        ]}],
    }  # fmt: skip
    (tmp_path / "test.yml").write_text(yaml.safe_dump(text))
    assert "SUCCESS" in ran(tmp_path, "test", "rules", "test.yml")


def _annotations(name: str, labels: dict[str, str]) -> dict[str, str]:
    found = next(one for one in list_alerts() if one.name == name)
    what = found.summary.partition("{{ end }}")[2]
    return {"summary": f"GPU {labels['gpu']} of n1{what}", "description": found.runbook}


def test_dashboards_hold_what_grafana_needs() -> None:
    made = {name: json.loads(text) for name, text in render_dashboards("hostname").items()}
    assert set(made) == {f"{name}.json" for name in DASHBOARD_TITLES}
    assert {one for panel in list_panels() for one in panel.dashboards} == set(DASHBOARD_TITLES)
    for board in made.values():
        assert {"uid", "title", "schemaVersion", "time", "templating", "panels"} <= board.keys()
        assert len(board["uid"]) <= 40
        assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) > 5
        for panel in board["panels"]:
            assert {"type", "title", "datasource", "gridPos", "fieldConfig", "targets"} <= set(
                panel
            )
            assert all(one["refId"] and one["expr"] for one in panel["targets"])
        _do_not_overlap([panel["gridPos"] for panel in board["panels"]])
    told = json.dumps(made["node.json"])
    assert '{hostname=~\\"$node\\"}' in told
    assert "NODE" not in told.replace("NODE_", "")


def _do_not_overlap(places: list[dict[str, int]]) -> None:
    cells = [
        (at["x"] + dx, at["y"] + dy)
        for at in places
        for dx in range(at["w"])
        for dy in range(at["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


@promtool
def test_promtool_reads_every_query_of_the_dashboards(tmp_path: Path) -> None:
    queries = [
        query.expr.replace("$node", ".*") for panel in list_panels() for query in panel.queries
    ]
    made = [{"record": f"q:{at}", "expr": expr} for at, expr in enumerate(queries)]
    text = yaml.safe_dump({"groups": [{"name": "queries", "rules": made}]})
    (tmp_path / "rules.yml").write_text(text)
    assert f"{len(made)} rules found" in ran(tmp_path, "check", "rules", "rules.yml")
