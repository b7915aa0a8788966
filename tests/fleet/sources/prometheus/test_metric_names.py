import json
from pathlib import Path

import numpy as np
import pytest

from meshwright.fleet.sources.prometheus.gpu_samples import _scales, build_query
from meshwright.fleet.sources.prometheus.metric_names import (
    FAULT_METRICS,
    METRIC_FIELDS,
    UNUSED_MEMORY_FIELDS,
    MetricName,
    convert_unit,
    mask_blanks,
)
from meshwright.fleet.sources.prometheus.query import PrometheusScope
from meshwright.fleet.sources.prometheus.response import TimeSeries
from meshwright.fleet.tables import GPU_METRICS

_BY_COLUMN = {field.column: field for field in METRIC_FIELDS}


def test_every_column_of_samples_has_a_metric() -> None:
    assert set(_BY_COLUMN) == set(GPU_METRICS)


def test_names_are_those_of_dcgm_old_and_new(shared: Path) -> None:
    file = shared / "validation" / "dcgm_fields.json"
    if not file.is_file():
        pytest.skip("needs the list of DCGM's fields")
    listed = json.loads(file.read_text())["fields"]
    known = {name for field in listed for name in (field["name"], *field["old_names"])}
    ours = {name.name for field in (*METRIC_FIELDS, *UNUSED_MEMORY_FIELDS) for name in field.names}
    ours |= {name for fault in FAULT_METRICS for name in fault.names}
    ours = {name for name in ours if name.startswith("DCGM_FI_")}
    # Fields in base units, and a total for NVLink beside that for PCIe, are newer than the list.
    newer = {name for name in ours - known if name.endswith(("_BYTES", "_HERTZ", "BYTES_TOTAL"))}
    assert ours - newer <= known
    assert len(newer) <= 5


@pytest.mark.parametrize("blank", [2147483632.0, 2147483635.0, 9223372036854775794.0,
    140737488355328.0, 140737488355330.0, 100 * 140737488355328.0, 214748363200.0])  # fmt: skip
def test_blanks_of_every_width_are_dropped_also_when_multiplied(blank: float) -> None:
    assert np.isnan(mask_blanks(np.array([blank]))).all()


def test_what_lies_near_a_blank_is_a_value() -> None:
    values = np.array([2147483631.0, 2147483648.0, 2147483632.5, 3e9, 1e12])
    assert (mask_blanks(values) == values).all()


def test_a_mean_with_a_blank_in_it_is_no_value() -> None:
    power = _BY_COLUMN["power_w"]
    mean = np.array([(2147483632.0 + 2879 * 300.0) / 2880])  # one of a day
    assert np.isnan(convert_unit(mean, power.names[0], power)).all()


def test_percents_and_mebibytes_become_shares_and_bytes() -> None:
    util, memory = _BY_COLUMN["gpu_util"], _BY_COLUMN["memory_used"]
    assert convert_unit(np.array([50.0, 101.0, 250.0]), util.names[0], util).tolist()[:2] == [
        0.5,
        1.0,
    ]
    assert np.isnan(convert_unit(np.array([250.0]), util.names[0], util)).all()
    assert convert_unit(np.array([2.0]), memory.names[0], memory).tolist() == [2 * 2.0**20]


def test_a_ratio_that_is_a_percentage_is_told_by_its_values() -> None:
    def one(node: str, *values: float) -> tuple[str, int, TimeSeries]:
        found = np.array(values)
        return node, 0, TimeSeries({}, np.arange(len(found), dtype=float), found)

    assert _scales([one("a", 0.5), one("b", 1.0)], frozenset("a")) == {"a": 1.0, "b": 1.0}
    mixed = [one("a", 57.0), one("b", 1.0, 0.0), one("c", 0.25)]
    assert _scales(mixed, frozenset("c")) == {"a": 0.01, "b": 0.01, "c": 1.0}
    assert _scales([one("a", np.nan, 140737488355328.0)], frozenset()) == {"a": 1.0}


def test_the_server_rolls_up_and_drops_labels_that_would_split_a_series() -> None:
    fleet = PrometheusScope("c", frozenset(), 'cluster="east"', scrape_interval_s=15)
    asked = build_query(fleet, _BY_COLUMN["gpu_util"], MetricName("X"), 300)
    assert asked.endswith('(avg_over_time(X{cluster="east"}[299999ms]))')
    assert "pod" not in asked
    counted = build_query(fleet, _BY_COLUMN["pcie_tx"], MetricName("Y", is_counter=True), 30)
    assert counted.endswith('(rate(Y{cluster="east"}[59999ms]))')
