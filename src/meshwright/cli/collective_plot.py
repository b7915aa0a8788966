"""Bus bandwidth by size, one line per algorithm."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.errors import InputError, MissingPart, Problem
from meshwright.spec.units import format_bytes

if TYPE_CHECKING:
    from meshwright.run.parallel.collective.bench import Row


def plot(path: str, rows: Sequence["Row"]) -> None:
    """Draw the rows that keep input and output apart."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        hint = "pip install 'meshwright[plots]'"
        raise MissingPart("--plot needs matplotlib, which is not installed", hint) from None
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for row in rows:
        if not row.in_place:
            name = (
                row.algorithm if row.transport != "shared" else f"{row.algorithm} (shared memory)"
            )
            lines[name].append((row.size_bytes, row.busbw_gbps))
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, points in lines.items():
        across, rates = zip(*points, strict=True)
        axes.plot(across, rates, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    sizes = sorted({row.size_bytes for row in rows})
    shown = sizes[:: max(1, len(sizes) // 8)]
    axes.set_xticks(shown, [format_bytes(size) for size in shown])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("message")
    axes.set_ylabel("bus bandwidth in GB/s")
    first = rows[0]
    axes.set_title(f"{first.op}, {first.ranks} ranks, {first.dtype}, out of place")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, format=Path(path).suffix.lstrip(".") or "svg")
    except (OSError, ValueError) as error:
        fix = "name an .svg or .png file in a folder that exists"
        raise InputError([Problem(path, f"cannot be written: {error}", fix)]) from None
