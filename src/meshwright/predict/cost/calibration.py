"""`Calibration`: measured efficiency curves of one device, with TOML, JSON and YAML I/O."""

from pathlib import Path

import msgspec

from meshwright.errors import Problem
from meshwright.file_errors import make_parent_folder
from meshwright.predict.cost.curves import (
    AttentionCurve,
    CurveResiduals,
    GemmCurve,
    LaunchCurve,
    LinkCurve,
    MeasuredPeaks,
    MemoryCurve,
    _not_negative,
    _shares,
)
from meshwright.spec.field_checks import check_number, raise_problems
from meshwright.spec.file_formats import dump, load


class Calibration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured efficiencies of one device, which replace the default curves one by one."""

    gpu: str
    """Catalog name of the device; for one that is not there, what a cluster's file calls it."""
    source: str
    """Where, when and with which software it was measured."""
    products: tuple[GemmCurve, ...] = ()
    """One curve per precision."""
    attention: tuple[AttentionCurve, ...] = ()
    """One curve per kernel and direction."""
    memory: tuple[MemoryCurve, ...] = ()
    """One figure per class of elementwise work."""
    launch: LaunchCurve | None = None
    """What launching costs."""
    link: LinkCurve | None = None
    """What copies to and from the host reach."""
    grouped_efficiency: float | None = None
    """Efficiency of a grouped product over a dense one."""
    grouped_launch_s: float | None = None
    """Time a grouped product takes on top of a dense one's launch."""
    sustained_slowdown: float | None = None
    """How much longer large products take under lasting full load (power limit) than cool."""
    grouped: GemmCurve | None = None
    """A curve of grouped products' own, in place of the two figures above for its precision."""
    residuals: tuple[CurveResiduals, ...] = ()
    """What the curves leave, for those measured shape by shape."""
    software: str = ""
    """Whose kernels were measured under load, as that software calls them: predictions of it need
    no allowance for what happens inside a step. Empty: kernels alone, as a library runs them."""
    peaks: MeasuredPeaks | None = None
    """What the shares are of where the device is in no catalog."""

    def __post_init__(self) -> None:
        problems = [
            *_twice("products", [curve.precision for curve in self.products]),
            *_twice("attention", [f"{c.kernel} {c.part}" for c in self.attention]),
            *_twice("memory", [curve.op for curve in self.memory]),
            *_twice("residuals", [f"{one.family} {one.name}" for one in self.residuals]),
        ]
        if self.grouped_efficiency is not None:
            problems += _shares(grouped_efficiency=self.grouped_efficiency)
        if self.grouped_launch_s is not None:
            problems += _not_negative(grouped_launch_s=self.grouped_launch_s)
        if self.sustained_slowdown is not None:
            problems += check_number("sustained_slowdown", self.sustained_slowdown, 1.0, 10.0)
        raise_problems(problems)


def load_calibration(path: str | Path) -> Calibration:
    """Read a calibration from a TOML, JSON or YAML file."""
    return load(Calibration, path)


def save_calibration(calibration: Calibration, path: str | Path) -> None:
    """Write a calibration to a file that `load_calibration` reads back to an equal value."""
    make_parent_folder(Path(path))
    Path(path).write_text(dump(calibration, Path(path).suffix), encoding="utf-8")


def _twice(where: str, keys: list[str]) -> list[Problem]:
    seen = {key for key in keys if keys.count(key) > 1}
    return [Problem(where, f"{key} is given twice", "keep one") for key in sorted(seen)]
