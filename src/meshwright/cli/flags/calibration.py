"""Which calibration and which training software a prediction takes for granted."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.errors import InputError, Problem
from meshwright.predict.cost import (
    Calibration,
    build_device_costs,
    list_measured_devices,
    load_calibration,
)
from meshwright.predict.training_run.training_framework import FRAMEWORKS, TrainingFramework
from meshwright.spec.cluster import Gpu

_USUAL = "megatron"


class CalibrationChoice(NamedTuple):
    """What the constants of a device are."""

    calibration: Calibration | None
    description: str
    """For the screen."""
    path: Path | None = None
    framework: TrainingFramework = FRAMEWORKS[_USUAL]
    accuracy_note: str = ""
    """Why times are rough, and what would mend that; empty where the device was measured."""

    @property
    def data(self) -> dict[str, Any]:
        """For scripts."""
        source = None if self.calibration is None else self.calibration.source
        return {"path": None if self.path is None else str(self.path), "source": source}


def add_calibration(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose one."""
    group = parser.add_argument_group("calibration")
    group.add_argument(
        "--calibration", metavar="FILE",
        help="constants of the device as `mw calibrate` wrote them (default: the user's own)",
    )  # fmt: skip
    group.add_argument(
        "--no-calibration", action="store_true", help="built-in constants, whatever was measured"
    )


def add_software(parser: argparse.ArgumentParser) -> None:
    """Add the flag that says which software trains."""
    parser.add_argument(
        "--framework", choices=tuple(FRAMEWORKS), default=_USUAL,
        help="what trains: megatron (Megatron-Core with Transformer Engine, and its kin; default), "
        "eager (plain PyTorch with FSDP), meshwright (mw train)",
    )  # fmt: skip


def choose_calibration(args: argparse.Namespace, gpu: Gpu) -> CalibrationChoice:
    """Return the calibration for a device that the flags and the user's folder say.

    Where a command asks which software trains, that is said with it.
    """
    found, name = _calibration(args, gpu), getattr(args, "framework", None)
    if name is None:
        return found
    measured = found.calibration.software if found.calibration is not None else ""
    words = found.description + ("" if name == _USUAL and not measured else f"; software: {name}")
    if measured and measured != name:
        words += f" (the kernels measured are those of {measured})"
    return found._replace(description=words, framework=FRAMEWORKS[name])


def _calibration(args: argparse.Namespace, gpu: Gpu) -> CalibrationChoice:
    if args.calibration is not None and args.no_calibration:
        what = "cannot be given with --no-calibration"
        raise InputError([Problem("--calibration", what, "give one of them")])
    if args.no_calibration:
        words = f"{_built_in(gpu)}; calibrations are switched off"
        return CalibrationChoice(None, words, accuracy_note=_rough(gpu))
    if args.calibration is not None:
        return _said(load_calibration(args.calibration), Path(args.calibration), gpu)
    from meshwright.observe.calibrate.calibration_file import find_calibration

    found = find_calibration(gpu.name)
    if found is None:
        return CalibrationChoice(None, _built_in(gpu), accuracy_note=_rough(gpu))
    return _said(*found, gpu)


def _said(calibration: Calibration, path: Path, gpu: Gpu) -> CalibrationChoice:
    if calibration.gpu != gpu.name:
        what = f"{path} is of {calibration.gpu}, and the work runs on {gpu.name}"
        raise InputError([Problem("--calibration", what, "calibrate that device, or leave it out")])
    return CalibrationChoice(calibration, f"calibrated, {path.name}: {calibration.source}", path)


def _rough(gpu: Gpu) -> str:
    """Say how far built-in constants are to be trusted that nobody measured on this device."""
    if gpu.name in list_measured_devices():
        return ""
    # A processor is no small GPU: training was told to take 5 to 12 times as long as it took.
    how = "rough, and may be ten times off" if gpu.kind == "cpu" else "rough"
    return (
        f"{how}, as {gpu.name} has no measured calibration; make one there: "
        f"mw bench --quick -o bench.jsonl && mw calibrate bench.jsonl --gpu {gpu.name}"
    )


def _built_in(gpu: Gpu) -> str:
    basis = build_device_costs(gpu).basis
    return f"built-in constants, {basis} (mw calibrate makes your own)"
