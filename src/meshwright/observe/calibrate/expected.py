"""What rows of a bench would take on a sound device of its kind, as the cost models have it.

Their built-in constants come from measurements of many devices, or of a relative where there are
none of its own: `basis` says which. Rows under load are held against the device at its power limit.
"""

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.observe.bench.case import Row
from meshwright.observe.calibrate.subjects import subjects
from meshwright.predict.cost.curves import MEMORY_OPS
from meshwright.predict.cost.device import costs_for, under_load
from meshwright.predict.cost.memory_bound import memory_s
from meshwright.spec.cluster import Gpu

LINK_SHARE = 0.85
"""Of a link's stated bandwidth that large copies from pinned memory reach (assumed): headers of
packets and acknowledgements take the rest."""
LARGE_BYTES = 16 << 20
"""Smaller copies are launched more than they are carried out."""


class Expected(NamedTuple):
    """Times that rows are held against."""

    seconds: dict[str, float]
    """By key; rows that nothing is known of are left out."""
    basis: str


def expected_of(rows: Sequence[Row], gpu: Gpu) -> Expected:
    """Return the times of a sound device."""
    cool = costs_for(gpu)
    hot = under_load(cool)
    found = dict[str, float]()
    for subject in subjects(rows, gpu):
        for row in subject.rows:
            found[row.case.key] = subject.seconds(hot if row.loaded else cool, row)
    for row in rows:
        name, moved = row.case.name, row.bytes
        if not moved or row.case.family not in ("elementwise", "copies"):
            continue
        if row.case.family == "elementwise" and name in MEMORY_OPS:
            found[row.case.key] = memory_s(cool, name, moved)
        elif name == "copy" and moved >= LARGE_BYTES:
            found[row.case.key] = memory_s(cool, "copy", moved)
        elif _over_link(row) and moved >= LARGE_BYTES and gpu.pcie_bytes_per_s:
            found[row.case.key] = moved / (LINK_SHARE * gpu.pcie_bytes_per_s)
    return Expected(found, cool.basis)


def _over_link(row: Row) -> bool:
    one_way = row.case.name in ("host_to_device", "device_to_host")
    return one_way and row.case.sizes.get("memory") == "pinned"
