from typing import Any

import numpy as np
import pytest

from meshwright.fleet.sources.prometheus.fault_events import read_fault_events
from meshwright.fleet.sources.prometheus.query import PrometheusScope, QueryWindow
from meshwright.fleet.sources.prometheus.response import TimeSeries
from meshwright.fleet.sources.prometheus.time_grid import TimeGrid

GPU = {"gpu": "0", "UUID": "GPU-a", "Hostname": "n1"}
GRID = TimeGrid(3630.0, 30.0, 20)
"""Ten minutes, after an hour."""


class Told:
    """A server that has some series, and answers any question about a metric with them."""

    def __init__(self, series: dict[str, list[tuple[dict[str, str], dict[float, float]]]]) -> None:
        self.series = series

    def query_instant(self, expression: str, _at_s: float) -> list[TimeSeries]:
        name = max((each for each in self.series if each in expression), key=len)
        return [
            TimeSeries(labels, np.array(list(values)), np.array(list(values.values())))
            for labels, values in self.series[name]
        ]


def _read(**series: list[tuple[dict[str, str], dict[float, float]]]) -> list[tuple[Any, ...]]:
    told: Any = Told(series)
    fleet = PrometheusScope("c", frozenset(series), scrape_interval_s=30.0)
    found = read_fault_events(QueryWindow(told, fleet, GRID)).to_pylist()
    return [(row["kind"], row["code"], row["time_s"], row["count"]) for row in found]


def _every(value: Any, first: float = 0.0) -> dict[float, float]:
    return {at: float(value(at)) for at in np.arange(first, 4231.0, 30.0).tolist()}


def test_an_xid_that_was_there_before_is_no_event() -> None:
    assert _read(DCGM_FI_DEV_XID_ERRORS=[(GPU, _every(lambda _: 31))]) == []


def test_an_xid_that_changes_is_one_event_however_long_it_stays() -> None:
    values = _every(lambda at: 31 if at < 3900 else 79)
    assert _read(DCGM_FI_DEV_XID_ERRORS=[(GPU, values)]) == [("xid", 79, 3900, 1)]


def test_a_gauge_that_falls_back_to_nought_is_no_event() -> None:
    values = _every(lambda at: 31 if at < 3900 else 0)
    assert _read(DCGM_FI_DEV_XID_ERRORS=[(GPU, values)]) == []


def test_a_gauge_and_two_counts_tell_one_xid() -> None:
    found = _read(
        DCGM_FI_DEV_XID_ERRORS=[(GPU, _every(lambda at: 79 * (at >= 3900)))],
        DCGM_EXP_XID_ERRORS_COUNT=[(GPU | {"xid": "79"}, _every(lambda _: 1, 3900.0))],
        DCGM_EXP_XID_ERRORS_TOTAL=[(GPU | {"xid": "79"}, _every(lambda _: 2, 3930.0))],
    )
    assert found == [("xid", 79, 3930, 2)]


def test_the_same_xid_in_two_scrapes_is_two_events() -> None:
    total = _every(lambda at: (at >= 3900) + (at >= 3930))
    found = _read(DCGM_EXP_XID_ERRORS_TOTAL=[(GPU | {"xid": "79"}, total)])
    assert found == [("xid", 79, 3900, 1), ("xid", 79, 3930, 1)]


def test_a_counter_is_followed_by_its_device_through_pods_and_indexes() -> None:
    before = {at: value for at, value in _every(lambda _: 5).items() if at < 3900}
    after = {at: value for at, value in _every(lambda _: 7).items() if at >= 3900}
    moved = GPU | {"gpu": "1", "pod": "another"}
    found = _read(DCGM_FI_DEV_ECC_DBE_VOL_TOTAL=[(GPU, before), (moved, after)])
    assert found == [("ecc", None, 3900, 2)]


@pytest.mark.parametrize("blank", [2147483632.0, 9223372036854775792.0, 140737488355328.0])
def test_a_blank_in_a_counter_is_neither_a_rise_nor_a_reset(blank: float) -> None:
    values = _every(lambda at: blank if at == 3900 else 5)
    assert _read(DCGM_FI_DEV_PCIE_REPLAY_COUNTER=[(GPU, values)]) == []


def test_two_ports_of_a_node_are_added_up() -> None:
    port = {"instance": "n1:9100", "device": "mlx5_0"}
    down = _every(lambda at: at >= 3900)
    found = _read(
        node_infiniband_link_downed_total=[
            (port | {"port": "1"}, down),
            (port | {"port": "2"}, down),
        ]
    )
    assert found == [("infiniband", None, 3900, 2)]
