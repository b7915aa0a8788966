"""Copies: within a device's memory, and between it and its host's.

Within the device events mark the time, and a small copy goes through a buffer larger than the last
cache piece by piece. Across the link the host's clock does, from the first copy to the last one's
end, as a program that waits for them sees it. Pinned memory is what the host has set aside for
transfers; `pageable` is any other, which goes through a pinned buffer of the driver's.
"""

import time
from functools import partial
from typing import TYPE_CHECKING

from meshwright.observe.bench.bench_case import BenchCase
from meshwright.observe.bench.bench_family import BenchFamily, BenchTarget, Size
from meshwright.observe.bench.timing import LAST_LEVEL_CACHE_BYTES, Call, TimedWork

if TYPE_CHECKING:
    import torch

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DEVICE_COPY_BYTES: dict[Size, tuple[int, ...]] = {
    "full": (GIB, 256 * MIB, 4 * GIB, 64 * MIB, 16 * MIB, MIB, 64 * KIB),
    "quick": (GIB, 64 * MIB),
}
"""Bytes of a copy within a GPU's memory."""
HOST_LINK_COPY_BYTES: dict[Size, tuple[int, ...]] = {
    "full": (256 * MIB, GIB, 16 * MIB, MIB, 64 * KIB),
    "quick": (256 * MIB,),
}
"""Bytes of a copy between host and GPU."""
HOST_COPY_BYTES: dict[Size, tuple[int, ...]] = {
    "full": (128 * MIB, 32 * MIB, MIB, 64 * KIB),
    "quick": (128 * MIB,),
}
"""Bytes of a copy within a processor's memory."""
WITHIN = ("copy", "fill")
ACROSS = ("host_to_device", "device_to_host", "both_ways")
MEMORIES = ("pinned", "pageable")
MAX_CHUNKS = 512
MAX_FREE_MEMORY_SHARE = 0.5
"""Share of what memory is free that a case may take."""


def list_copy_cases(size: Size, on_gpu: bool) -> tuple[BenchCase, ...]:
    """Return copies within the device, then across the link, the large ones first."""
    sizes = DEVICE_COPY_BYTES[size] if on_gpu else HOST_COPY_BYTES[size]
    found = [_case(name, each) for each in sizes for name in WITHIN]
    if on_gpu:
        found += [
            _case(name, each, memory)
            for memory in (MEMORIES if size == "full" else MEMORIES[:1])
            for each in HOST_LINK_COPY_BYTES[size]
            for name in ACROSS
            if (name, memory) != ("both_ways", "pageable")  # the driver makes one wait for another
        ]
    return tuple(found)


def _case(name: str, size_bytes: int, memory: str = "") -> BenchCase:
    words = {"memory": memory} if memory else {}
    return BenchCase(family="memory_copies", name=name, sizes={"bytes": size_bytes, **words})


def prepare_copy(case: BenchCase, place: BenchTarget) -> TimedWork | None:
    """Make the buffers; None where they would take more than half of what is free."""
    size = case.size("bytes")
    if place.on_gpu:
        import torch

        free, _ = torch.cuda.mem_get_info(place.device)
        if 2 * size > MAX_FREE_MEMORY_SHARE * free:
            return None
    return _across(case, place, size) if case.name in ACROSS else _within(case, place, size)


def _within(case: BenchCase, place: BenchTarget, size: int) -> TimedWork:
    import torch

    pieces = max(1, min(MAX_CHUNKS, LAST_LEVEL_CACHE_BYTES // size))
    there = torch.empty(pieces, size, dtype=torch.uint8, device=place.device)
    if case.name == "fill":
        return TimedWork(tuple(partial(one.fill_, 7) for one in there), None, float(size))
    here = _drawn(pieces * size, place.device).view(pieces, size)
    calls = tuple(partial(to.copy_, from_) for to, from_ in zip(there, here, strict=True))
    return TimedWork(calls, None, 2.0 * size)  # read and written


def _drawn(number: int, device: "torch.device") -> "torch.Tensor":
    """Return bytes by chance, the same stretch of them again and again: drawing all takes long."""
    import torch

    stretch = torch.randint(256, (min(number, MIB),), dtype=torch.uint8, device=device)
    return stretch.repeat(-(-number // len(stretch)))[:number]


def _across(case: BenchCase, place: BenchTarget, size: int) -> TimedWork:
    import torch

    pinned = case.text("memory") == "pinned"
    ways = ("host_to_device", "device_to_host") if case.name == "both_ways" else (case.name,)
    copies = list[Call]()
    for way in ways:
        far = _drawn(size, place.device)
        near = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        near.copy_(far)  # memory that nobody has written is not there yet
        source, target = (near, far) if way == "host_to_device" else (far, near)
        stream = torch.cuda.Stream(place.device)  # type: ignore[no-untyped-call]
        copies.append(_on(stream, source, target))

    def sample() -> float:
        torch.cuda.synchronize(place.device)
        begun = time.perf_counter()
        for copy in copies:
            copy()
        torch.cuda.synchronize(place.device)
        return time.perf_counter() - begun

    return TimedWork(tuple(copies), None, float(size * len(ways)), sample)


def _on(stream: "torch.cuda.Stream", source: "torch.Tensor", target: "torch.Tensor") -> Call:
    import torch

    def copy() -> None:
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    return copy


MEMORY_COPY_FAMILY = BenchFamily(
    "memory_copies", "copies in memory and across the link", list_copy_cases, prepare_copy,
    typical_s={"quick": 1.5, "full": 14.0},
)  # fmt: skip
