"""Where calibrations lie: one file per device in the user's data folder."""

import os
from collections.abc import Mapping
from pathlib import Path

from meshwright.errors import InputError, Problem
from meshwright.predict.cost.calibration import Calibration, load_calibration, save_calibration

CALIBRATION_ENV_VAR = "MESHWRIGHT_CALIBRATIONS"
"""Another folder, or `off`."""


def find_calibration_folder(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the user's folder; None where it is switched off, or nobody is at home."""
    said = environment.get(CALIBRATION_ENV_VAR, "").strip()
    if said.lower() in {"off", "0", "no", "false"}:
        return None
    if said:
        return Path(said).expanduser()
    base = Path(environment.get("XDG_DATA_HOME", ""))
    try:
        root = base if base.is_absolute() else Path.home() / ".local" / "share"
    except RuntimeError:
        return None
    return root / "meshwright" / "calibrations"


def build_default_path(gpu: str, environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return where the calibration of a device belongs."""
    home = find_calibration_folder(environment)
    return None if home is None else home / f"{gpu}.toml"


def find_calibration(
    gpu: str, environment: Mapping[str, str] = os.environ
) -> tuple[Calibration, Path] | None:
    """Return the calibration that the user has of a device."""
    path = build_default_path(gpu, environment)
    if path is None or not path.is_file():
        return None
    return load_calibration(path), path


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration, making the folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_calibration(calibration, path)
    except OSError as error:
        what = f"cannot write: {error.strerror or error}"
        raise InputError([Problem(str(path), what, "name another file with -o")]) from None
