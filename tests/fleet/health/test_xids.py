"""Xids: all of them are known, and those of programs never take a node out of service."""

import json
from pathlib import Path

import pytest

from meshwright.fleet.health.xids import (
    advise_xid,
    find_xid,
    list_drain_xids,
    load_xid_catalog,
)
from meshwright.fleet.sources.kernel.messages import is_fatal

SHARED = Path(__file__).parents[4] / "shared" / "validation" / "xid_catalog.json"


@pytest.mark.parametrize("code", [8, 13, 31, 32, 43, 45, 68, 69, 137])
def test_xids_of_programs_never_drain(code: int) -> None:
    assert find_xid(code).origin == "application"
    assert advise_xid(code, "a fatal error, GPU Reset Required").action == "none"
    assert code not in list_drain_xids()


def test_what_restarting_the_program_mends_drains_nothing() -> None:
    restarted = [
        one.code
        for one in load_xid_catalog().values()
        if one.immediate_action in ("RESTART_APP", "IGNORE")
    ]
    assert not set(restarted) & set(list_drain_xids())


@pytest.mark.parametrize(
    ("code", "mend"), [(48, "reset"), (79, "reboot"), (54, "replace"), (119, "reset")]
)
def test_xids_of_hardware_drain(code: int, mend: str) -> None:
    assert advise_xid(code) == ("drain", mend)


def test_nvlink_5_goes_by_how_grave_the_text_is() -> None:
    assert advise_xid(149, "NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x4)").action == "drain"
    assert advise_xid(145, "RLW_REMAP Nonfatal XC0 i0 Link 00 (0x4)").action == "watch"
    assert not is_fatal("Non-fatal, Link 32")


def test_154_goes_by_what_the_driver_asks_for() -> None:
    changed = "GPU recovery action changed from 0x0 (None) to "
    assert advise_xid(154, changed + "0x1 (GPU Reset Required)") == ("drain", "reset")
    assert advise_xid(154, changed + "0x2 (Node Reboot Required)") == ("drain", "reboot")
    back = "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
    assert advise_xid(154, back).action == "none"


def test_a_number_nobody_knows_is_watched() -> None:
    assert find_xid(999).origin == "unknown"
    assert advise_xid(999).action == "watch"


def test_actions_are_those_of_the_source() -> None:
    if not SHARED.exists():
        pytest.skip("the shared copy of NVIDIA's catalogue is not here")
    told = {one["code"]: one for one in json.loads(SHARED.read_text())["codes"]}
    assert told.keys() == load_xid_catalog().keys()
    assert all(
        one.immediate_action == told[code]["immediate_action"]
        for code, one in load_xid_catalog().items()
    )
    assert [code for code in told if told[code]["description"] == "Unused"] == [
        code for code, one in load_xid_catalog().items() if one.meaning == "not used"
    ]
