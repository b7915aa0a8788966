"""Where the device's busy time goes, kernel by kernel, and how near to its limits each runs.

FLOPs come from the operator that launched a kernel (`find_operator_flops`); of several kernels that
one call launched, the longest has them that does not only move or sum data, or the two longest
where the call is of two products. Peaks come from the catalog, by the name of the device.
"""

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from meshwright.observe.analyze.compute_efficiency.operator_flops import (
    OperatorFlops,
    find_operator_flops,
)
from meshwright.observe.analyze.compute_efficiency.trace_device import (
    find_peak_flops,
    find_trace_device,
)
from meshwright.observe.analyze.spans.analysis_extent import AnalysisExtent, select_counted_spans
from meshwright.observe.analyze.spans.call_stacks import build_call_stacks, find_innermost
from meshwright.observe.analyze.spans.device_spans import DEVICE_KINDS
from meshwright.observe.analyze.spans.device_split import split_by_device
from meshwright.observe.analyze.spans.intervals import (
    COMPUTE,
    MEMORY_COPY,
    DeviceSpans,
    Ints,
    measure_total_ns,
)
from meshwright.observe.analyze.spans.steps import find_launch_rows, number_threads
from meshwright.timeline.readers.parsing.arrow_arrays import take_rows
from meshwright.timeline.schema import ABSENT, SpanKind
from meshwright.timeline.timeline import Timeline

if TYPE_CHECKING:
    from meshwright.spec.cluster import Gpu

_AROUND_PRODUCTS = re.compile(
    r"(?i)transpose|splitk.*reduce|reduce_kernel|elementwise|im2col|col2im|nchwtonhwc|nhwctonchw|"
    r"cast|fill|copy|convert_tensor|SubTensorOp"
)
"""Kernels that libraries launch beside a product: layouts, sums of its pieces."""


@lru_cache(1 << 14)
def _is_around(name: str) -> bool:
    return _AROUND_PRODUCTS.search(name) is not None


class KernelRow(NamedTuple):
    """All launches of one kernel, or copies of one sort, on one rank."""

    name: str
    kind: SpanKind
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
    kernels: tuple[KernelRow, ...]


class KernelFlops(NamedTuple):
    """Which product each device span carries out."""

    flops: Any
    """FLOPs per device span; 0 where it has none."""
    operator_index: Ints
    """Place in the products; -1 where it has none."""


def analyze_kernels(
    timeline: Timeline, extent: AnalysisExtent = AnalysisExtent.COMPLETE_STEPS
) -> tuple[RankKernels, ...]:
    """The kernel tables of all ranks."""
    return tuple(analyze_rank_kernels(part, extent) for part in split_by_device(timeline))


def analyze_rank_kernels(
    part: Timeline, extent: AnalysisExtent = AnalysisExtent.COMPLETE_STEPS
) -> RankKernels:
    """The kernel table of one rank."""
    spans = select_counted_spans(part, extent)
    found, device = find_operator_flops(part), find_trace_device(part)
    has = attribute_flops(part, spans, found)
    busy_ns = measure_total_ns(spans.intervals_of())
    rows = _rows(part, spans, busy_ns, (has, found, device)) if spans.row.size else []
    rows.sort(key=lambda kernel: -kernel.total_ns)
    rank = part.ranks[0] if part.ranks else 0
    return RankKernels(rank, device.name if device else "", busy_ns, tuple(rows))


def attribute_flops(part: Timeline, spans: DeviceSpans, found: OperatorFlops) -> KernelFlops:
    """Give each product's FLOPs to the longest kernel that its operator launched.

    A call of two products, such as both gradients of a convolution, has the two longest.
    """
    flops = np.zeros(spans.row.size)
    product = np.full(spans.row.size, ABSENT, dtype=np.int64)
    launch = find_launch_rows(part, spans)
    known = np.flatnonzero((launch != ABSENT) & (spans.kind == COMPUTE))
    if not found.row.size or not known.size:
        return KernelFlops(flops, product)
    start, duration = part.column("start_ns"), part.column("duration_ns")
    thread = number_threads(part)
    end = start[found.row] + duration[found.row]
    tree = build_call_stacks(thread[found.row], start[found.row], end)
    place = find_innermost(tree, thread[launch[known]], start[launch[known]])
    inside = place != ABSENT
    known, place = known[inside], place[inside]
    length = spans.end[known] - spans.start[known]
    around = np.zeros(len(spans.names), dtype=np.bool_)
    for code in np.flatnonzero(np.bincount(spans.name[known], minlength=1)).tolist():
        around[code] = _is_around(spans.names[code])
    main = ~around[spans.name[known]]
    longest_last = np.lexsort((length, main, place))
    known, place, main = known[longest_last], place[longest_last], main[longest_last]
    if not place.size:
        return KernelFlops(flops, product)
    chosen = np.append(place[1:] != place[:-1], True)
    second = np.append(chosen[1:] & ~chosen[:-1] & main[:-1], False) & (found.num_gemms[place] > 1)
    chosen |= second
    shares = np.bincount(place[chosen], minlength=found.row.size)
    flops[known[chosen]] = found.flops[place[chosen]] / shares[place[chosen]]
    product[known[chosen]] = place[chosen]
    return KernelFlops(flops, product)


class _Rates(NamedTuple):
    """What a kernel's products make of the device."""

    shape: str = ""
    dtype: str = ""
    flops_per_s: float | None = None
    peak_share: float | None = None


def _rows(
    part: Timeline,
    spans: DeviceSpans,
    busy_ns: int,
    counts: "tuple[KernelFlops, OperatorFlops, Gpu | None]",
) -> list[KernelRow]:
    """One row of the table for each name."""
    has = counts[0]
    length = spans.end - spans.start
    order = np.lexsort((length, spans.name))
    names = spans.name[order]
    first = np.flatnonzero(np.append(True, names[1:] != names[:-1]))
    last = np.append(first[1:], names.size) - 1
    size = part.column("bytes")[spans.row[order]]
    length, sized = length[order], size >= 0
    columns = (
        last - first + 1,
        np.add.reduceat(length, first),
        length[first],
        length[last],
        np.add.reduceat(has.flops[order], first),
        np.add.reduceat(np.where(sized, size, 0), first),
        np.add.reduceat(np.where(sized, length, 0), first),
        np.logical_or.reduceat(has.operator_index[order] != ABSENT, first),
        spans.kind[order[last]],
    )
    grids = _grids(part, spans.row[order[last]])
    found = []
    for at, row in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        number, total, least, most, flops, copied, took, is_product, kind = row
        name = spans.names[names[first[at]]]
        own = order[first[at] : last[at] + 1]
        rates = _rates(name, own, spans, counts) if is_product else _Rates()
        found.append(
            KernelRow(
                name=name,
                kind=DEVICE_KINDS[kind],
                num_launches=number,
                total_ns=total,
                mean_ns=total / number,
                min_ns=least,
                max_ns=most,
                share=total / busy_ns if busy_ns else 0.0,
                grid=grids[at],
                shape=rates.shape,
                dtype=rates.dtype,
                flops=flops,
                flops_per_s=rates.flops_per_s,
                peak_share=rates.peak_share,
                bytes_per_s=copied * 1e9 / took if kind == MEMORY_COPY and took else None,
            )
        )
    return found


def _rates(
    name: str,
    own: Ints,
    spans: DeviceSpans,
    counts: "tuple[KernelFlops, OperatorFlops, Gpu | None]",
) -> _Rates:
    """What is known of a kernel whose spans, shortest first, carry out products."""
    has, found, device = counts
    own = own[has.operator_index[own] != ABSENT]
    longest = int(has.operator_index[own[-1]])
    busy = int((spans.end[own] - spans.start[own]).sum())
    rate = float(has.flops[own].sum()) * 1e9 / busy if busy else None
    peak = find_peak_flops(device, found.dtype[longest], name) if device else None
    share = rate / peak if rate and peak else None
    return _Rates(found.shape[longest], found.dtype[longest], rate, share)


class _Launch(msgspec.Struct):
    grid: Any = None
    block: Any = None


_LAUNCH = msgspec.json.Decoder(_Launch)


def _grids(part: Timeline, rows: Ints) -> list[str]:
    """Grid and block of launches: `[132, 1, 1] x [384, 1, 1]`; empty where not said."""
    if "extra" not in part.known_columns or "extra" not in part.spans.column_names:
        return [""] * rows.size
    texts = take_rows(part.spans.column("extra"), rows).to_pylist()
    return [_grid(text) if text else "" for text in texts]


def _grid(text: str) -> str:
    try:
        launch = _LAUNCH.decode(text)
    except msgspec.MsgspecError:
        return ""
    return f"{launch.grid} x {launch.block}" if launch.grid and launch.block else ""
