"""Where calibrations lie."""

from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.observe.calibrate.calibration_file import (
    build_default_path,
    find_calibration,
    find_calibration_folder,
    write_calibration,
)
from tests.observe.calibrate.synthetic import TRUE


def test_they_lie_in_the_data_folder(tmp_path: Path) -> None:
    path = build_default_path("l4", {"XDG_DATA_HOME": str(tmp_path)})
    assert path == tmp_path / "meshwright" / "calibrations" / "l4.toml"


def test_a_variable_names_another_folder_or_none() -> None:
    assert find_calibration_folder({"MESHWRIGHT_CALIBRATIONS": "/mine"}) == Path("/mine")
    assert find_calibration_folder({"MESHWRIGHT_CALIBRATIONS": "off"}) is None
    assert find_calibration("l4", {"MESHWRIGHT_CALIBRATIONS": "off"}) is None


def test_what_was_written_is_found_for_its_device_alone(tmp_path: Path) -> None:
    there = {"MESHWRIGHT_CALIBRATIONS": str(tmp_path / "new")}
    path = build_default_path(TRUE.gpu, there)
    assert path is not None
    write_calibration(TRUE, path)
    assert find_calibration(TRUE.gpu, there) == (TRUE, path)
    assert find_calibration("l4", there) is None


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        write_calibration(TRUE, tmp_path / "file" / "l4.toml")
