"""Where calibrations lie."""

from pathlib import Path

import pytest

from meshwright.errors import InputError
from meshwright.observe.calibrate.file import find, folder, usual_path, write
from tests.observe.calibrate.synthetic import TRUE


def test_they_lie_in_the_data_folder(tmp_path: Path) -> None:
    path = usual_path("l4", {"XDG_DATA_HOME": str(tmp_path)})
    assert path == tmp_path / "meshwright" / "calibrations" / "l4.toml"


def test_a_variable_names_another_folder_or_none() -> None:
    assert folder({"MESHWRIGHT_CALIBRATIONS": "/mine"}) == Path("/mine")
    assert folder({"MESHWRIGHT_CALIBRATIONS": "off"}) is None
    assert find("l4", {"MESHWRIGHT_CALIBRATIONS": "off"}) is None


def test_what_was_written_is_found_for_its_device_alone(tmp_path: Path) -> None:
    there = {"MESHWRIGHT_CALIBRATIONS": str(tmp_path / "new")}
    path = usual_path(TRUE.gpu, there)
    assert path is not None
    write(TRUE, path)
    assert find(TRUE.gpu, there) == (TRUE, path)
    assert find("l4", there) is None


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        write(TRUE, tmp_path / "file" / "l4.toml")
