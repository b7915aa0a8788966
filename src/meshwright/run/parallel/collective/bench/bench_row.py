"""`MessageSizeSweep`: the sizes of a benchmark; `CollectiveBenchRow`: one measurement."""

from collections.abc import Iterator
from typing import Literal

import msgspec
import torch

from meshwright.errors import InputError, Problem
from meshwright.policy.collective.collective import PARTITIONED_OPS, Collective
from meshwright.run.parallel.collective.communicator import Transport

BenchBackend = Literal["gloo", "nccl", "mpi"]


class MessageSizeSweep(msgspec.Struct, frozen=True, kw_only=True):
    """Which sizes are measured, and how."""

    min_bytes: int = 1 << 10
    max_bytes: int = 1 << 24
    step_factor: int = 4
    dtype: str = "float32"
    warmup: int = 2
    iterations: int = 10
    backend: BenchBackend = "gloo"
    transport: Transport = "auto"
    baseline: bool = True
    """Whether the backend's own algorithm is measured too."""

    def __post_init__(self) -> None:
        problems = []
        if self.min_bytes < 1 or self.max_bytes < self.min_bytes:
            what = f"{self.min_bytes:,} to {self.max_bytes:,} bytes"
            problems.append(Problem("sizes", what, "begin with 1 or more and end no lower"))
        if self.step_factor < 2:
            problems.append(Problem("step_factor", f"{self.step_factor}", "use 2 or more"))
        if self.warmup < 0 or self.iterations < 1:
            what = f"{self.warmup} to warm up and {self.iterations} to measure"
            problems.append(Problem("iterations", what, "measure 1 or more"))
        kind = getattr(torch, self.dtype, None)
        if not isinstance(kind, torch.dtype):
            problems.append(Problem("dtype", f"{self.dtype!r} is no type", "such as float32"))
        if problems:
            raise InputError(problems)

    def sizes(self) -> Iterator[int]:
        """Return the sizes, in bytes."""
        size = self.min_bytes
        while size <= self.max_bytes:
            yield size
            size *= self.step_factor


class CollectiveBenchRow(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement."""

    op: str
    algorithm: str
    transport: str
    """`shm`, `torch`, or the backend where the algorithm is its own."""
    ranks: int
    dtype: str
    size_bytes: int
    elements: int
    in_place: bool
    time_us: float
    """Mean of the iterations on the slowest rank."""
    algbw_gbps: float
    """Size over time, in 10⁹ bytes per second."""
    busbw_gbps: float
    wrong: int
    """Elements that differ from the right result, over all ranks."""


def count_elements(collective: Collective, size_bytes: int, dtype: torch.dtype) -> int:
    """Return the elements of a message of about a size (of a chunk, for all_to_all_v)."""
    elements = max(1, size_bytes // dtype.itemsize)
    if collective.op == "all_to_all_v":
        return max(1, elements // max(1, *map(sum, collective.counts)))
    if collective.op in PARTITIONED_OPS:
        return max(1, elements // collective.ranks) * collective.ranks
    return elements
