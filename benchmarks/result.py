"""The shape of a benchmark's result, and whether a figure meets its target.

A benchmark module returns a plain dict from `measure`; `Measured` is that dict, checked. `Result`
adds what the runner knows (date, machine, cost) and is what `results/` keeps. Knows nothing of
how benchmarks are found or printed.
"""

import operator
import re
from collections.abc import Callable
from pathlib import Path

import msgspec

from benchmarks.machine import Machine

_TARGET = re.compile(r"\s*(<=|>=|<|>|≤|≥)\s*([0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)")
_COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    "≤": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "≥": operator.ge,
}


class Figure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One measured number."""

    name: str
    """What was measured, in a few words."""
    value: float
    """The number."""
    unit: str
    """Its unit: `s`, `GiB`, `spans/s`."""
    target: str = ""
    """What was promised, such as `< 15` or `>= 200_000`; empty where nothing was."""

    def __post_init__(self) -> None:
        if self.target and _TARGET.match(self.target) is None:
            raise ValueError(
                f"target of {self.name!r} is {self.target!r}; write it like '< 15' or '>= 200_000'"
            )


def figure(name: str, value: float, unit: str, target: str = "") -> dict[str, object]:
    """Return a figure as `measure` hands it back, its value in four digits."""
    short = float(f"{value:.4g}")
    return {"name": name, "value": short, "unit": unit} | ({"target": target} if target else {})


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What a benchmark's `measure` hands back."""

    figures: tuple[Figure, ...]
    """Our numbers."""
    peers: tuple[Figure, ...] = ()
    """The same job done by other tools, side by side."""
    notes: str = ""
    """How it was measured, and what a reader should beware of."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement with its date and machine: one file under `results/`."""

    name: str
    question: str
    """What the benchmark answers, as one sentence."""
    date: str
    """UTC day, `YYYY-MM-DD`."""
    wall_s: float
    """How long the whole benchmark ran."""
    peak_memory_bytes: int
    """Largest resident size of the process that measured."""
    machine: Machine
    measured: Measured


def met(figure: Figure) -> bool | None:
    """Whether the figure keeps its target; None where it has none."""
    parts = _TARGET.match(figure.target)
    if parts is None:
        return None
    limit = float(parts[2].replace("_", "").replace(",", ""))
    return _COMPARE[parts[1]](figure.value, limit)


def pretty(value: float) -> str:
    """Print a number with about four significant digits and thousands separated."""
    if value == 0 or not 1e-4 <= abs(value) < 1e15:
        return f"{value:.4g}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def write(result: Result, folder: Path) -> Path:
    """Keep the result under its date and name; a second run of the day replaces the first."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.date}-{result.name}.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    return path


def read_all(folder: Path) -> list[Result]:
    """Every result in the folder, by name and then oldest first."""
    results = [
        msgspec.json.decode(path.read_bytes(), type=Result) for path in folder.glob("*.json")
    ]
    return sorted(results, key=lambda result: (result.name, result.date))
