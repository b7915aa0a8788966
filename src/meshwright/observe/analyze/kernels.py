"""Where the device's busy time goes, kernel by kernel, and how near to its limits each runs.

FLOPs come from the operator that launched a kernel (`products`); of several kernels that one call
launched, the longest has them that does not only move or sum data. Peaks come from the catalog, by
the name of the device.
"""

import re
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwright.observe.analyze.device import device_of, peak_flops
from meshwright.observe.analyze.nest import innermost, nest
from meshwright.observe.analyze.products import Products, products
from meshwright.observe.analyze.spans import DEVICE_KINDS, DeviceSpans, Ints, measure
from meshwright.observe.analyze.steps import Extent, counted, launch_rows
from meshwright.spec.cluster import Gpu
from meshwright.timeline.schema import ABSENT, Kind
from meshwright.timeline.timeline import Timeline

_AROUND_PRODUCTS = re.compile(
    r"(?i)transpose|splitk.*reduce|reduce_kernel|elementwise|im2col|col2im|nchwtonhwc|nhwctonchw|"
    r"cast|fill|copy|convert_tensor|SubTensorOp"
)
"""Kernels that libraries launch beside a product: layouts, sums of its pieces."""


class Kernel(NamedTuple):
    """All launches of one kernel, or copies of one sort, on one rank."""

    name: str
    kind: Kind
    num_launches: int
    total_ns: int
    mean_ns: float
    min_ns: int
    max_ns: int
    share: float
    """Of the time in which the device was busy; kernels that run at once count each."""
    grid: str
    """Grid and block of the longest launch, as the trace says them."""
    shape: str
    """Shapes of the factors of the longest launch whose operator is known."""
    dtype: str
    """Their element type."""
    flops: float
    """Of all launches whose operator is known."""
    flops_per_s: float | None
    """Over the time of those launches."""
    peak_share: float | None
    """Of the device's peak for that type, 0 to 1."""
    bytes_per_s: float | None
    """Of copies whose size is known."""


class RankKernels(NamedTuple):
    """The kernel table of one rank, longest total first."""

    rank: int
    device: str
    """The catalog's name of the device; empty where it is not known."""
    busy_ns: int
    kernels: tuple[Kernel, ...]


class Attributed(NamedTuple):
    """Which product each device span carries out."""

    flops: Any
    """FLOPs per device span; 0 where it has none."""
    product: Ints
    """Place in the products; -1 where it has none."""


def kernels(timeline: Timeline, extent: Extent = Extent.SETTLED) -> tuple[RankKernels, ...]:
    """The kernel tables of all ranks."""
    return tuple(kernels_of(part, extent) for part in timeline.by_rank())


def kernels_of(part: Timeline, extent: Extent = Extent.SETTLED) -> RankKernels:
    """The kernel table of one rank."""
    spans = counted(part, extent)
    found, device = products(part), device_of(part)
    has = attribute(part, spans, found)
    busy_ns = measure(spans.of())
    order = np.lexsort((spans.end - spans.start, spans.name))
    names = spans.name[order]
    cuts = [0, *(np.flatnonzero(names[1:] != names[:-1]) + 1).tolist(), names.size]
    rows = [
        _kernel(part, spans, order[first:last], busy_ns, (has, found, device))
        for first, last in pairwise(cuts)
        if first < last
    ]
    rows.sort(key=lambda kernel: -kernel.total_ns)
    rank = part.ranks[0] if part.ranks else 0
    return RankKernels(rank, device.name if device else "", busy_ns, tuple(rows))


def attribute(part: Timeline, spans: DeviceSpans, found: Products) -> Attributed:
    """Give each product's FLOPs to the longest kernel that its operator launched."""
    flops = np.zeros(spans.row.size)
    product = np.full(spans.row.size, ABSENT, dtype=np.int64)
    launch = launch_rows(part, spans)
    known = np.flatnonzero((launch != ABSENT) & (spans.kind == 0))
    if not found.row.size or not known.size:
        return Attributed(flops, product)
    start = part.column("start_ns")
    end = start + part.column("duration_ns")
    lane = part.strings("lane").codes
    tree = nest(lane[found.row], start[found.row], end[found.row])
    place = innermost(tree, lane[launch[known]], start[launch[known]])
    inside = place != ABSENT
    known, place = known[inside], place[inside]
    length = spans.end[known] - spans.start[known]
    around = np.array([bool(_AROUND_PRODUCTS.search(name)) for name in spans.names] + [False])
    longest_last = np.lexsort((length, ~around[spans.name[known]], place))
    known, place = known[longest_last], place[longest_last]
    chosen = np.append(place[1:] != place[:-1], True) if place.size else np.zeros(0, np.bool_)
    flops[known[chosen]] = found.flops[place[chosen]]
    product[known[chosen]] = place[chosen]
    return Attributed(flops, product)


def _kernel(
    part: Timeline,
    spans: DeviceSpans,
    own: Ints,
    busy_ns: int,
    counts: tuple[Attributed, Products, Gpu | None],
) -> Kernel:
    """One row of the table; `own` are the kernel's spans, shortest first."""
    has, found, device = counts
    length = spans.end[own] - spans.start[own]
    total_ns = int(length.sum())
    name = spans.names[spans.name[own[-1]]]
    shape = dtype = ""
    rate = share = None
    product = has.product[own]
    if np.any(product != ABSENT):
        longest = int(product[product != ABSENT][-1])
        shape, dtype = found.shape[longest], found.dtype[longest]
        busy = int(length[product != ABSENT].sum())
        rate = float(has.flops[own].sum()) * 1e9 / busy if busy else None
        peak = peak_flops(device, dtype, name) if device else None
        share = rate / peak if rate and peak else None
    size = part.column("bytes")[spans.row[own]]
    is_copy = spans.kind[own[-1]] == 2
    copied, took = int(size[size >= 0].sum()), int(length[size >= 0].sum())
    return Kernel(
        name=name,
        kind=DEVICE_KINDS[spans.kind[own[-1]]],
        num_launches=int(own.size),
        total_ns=total_ns,
        mean_ns=total_ns / own.size,
        min_ns=int(length[0]),
        max_ns=int(length[-1]),
        share=total_ns / busy_ns if busy_ns else 0.0,
        grid=_grid(part, int(spans.row[own[-1]])),
        shape=shape,
        dtype=dtype,
        flops=float(has.flops[own].sum()),
        flops_per_s=rate,
        peak_share=share,
        bytes_per_s=copied * 1e9 / took if is_copy and took else None,
    )


class _Launch(msgspec.Struct):
    grid: Any = None
    block: Any = None


_LAUNCH = msgspec.json.Decoder(_Launch)


def _grid(part: Timeline, row: int) -> str:
    """Grid and block of one launch: `[132, 1, 1] x [384, 1, 1]`; empty where not said."""
    if "extra" not in part.known or "extra" not in part.spans.column_names:
        return ""
    text = part.spans.column("extra")[row].as_py()
    try:
        launch = _LAUNCH.decode(text) if text else _Launch()
    except msgspec.MsgspecError:
        return ""
    return f"{launch.grid} x {launch.block}" if launch.grid and launch.block else ""
