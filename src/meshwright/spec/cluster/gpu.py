"""`Gpu`: what one device can do, with where each figure was read. It knows no cluster.

Peaks are dense (no sparsity) and in FLOP/s; the measured figures are the best matrix product
that someone published for the device, which is what a cost model should start from.
"""

from typing import Literal, get_args

import msgspec

from meshwright.errors import InputError, Problem
from meshwright.spec.field_checks import FieldChecker
from meshwright.spec.name_suggestions import build_unknown_name_problem

DeviceKind = Literal["gpu", "cpu"]

_PEAK_FIELD = {
    "fp32": "fp32_flops",
    "tf32": "tf32_flops",
    "bf16": "bf16_flops",
    "fp16": "fp16_flops",
    "fp8": "fp8_flops",
    "fp8-tensorwise": "fp8_flops",
    "fp8-rowwise": "fp8_flops",
    "fp8-blockwise": "fp8_flops",
    "mxfp8": "fp8_flops",
    "fp4": "fp4_flops",
    "mxfp4": "fp4_flops",
    "nvfp4": "fp4_flops",
    "int8": "int8_ops",
}
# Block scaling is done by the tensor cores of these only; elsewhere the format has no peak.
_BLOCK_SCALED = {"mxfp8", "mxfp4", "nvfp4"}


class SpecSource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where some figures were read."""

    fields: tuple[str, ...]
    """The fields that it covers."""
    text: str
    """Paper, data sheet, repository or page; `recalled` opens a figure no document was read for."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.not_empty(text=self.text)
        bounds.mark_unreadable(fields=self.fields)
        if bounds.is_valid("fields") and not self.fields:
            bounds.add("fields", "a source covers at least one field", "name the fields")
        bounds.raise_problems()


class Gpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One accelerator (or a CPU that stands in for one): peaks, memory, caches, power."""

    name: str
    """Catalog name, lower case with dashes."""
    title: str
    """Name for people."""
    vendor: str
    """Who makes it, in lower case."""
    arch: str
    """Compute architecture as compilers name it: sm_90, gfx942, x86-64-v4."""
    kind: DeviceKind = "gpu"
    """A GPU, or a CPU used as the device."""
    aliases: tuple[str, ...] = ()
    """Other names that people and data sets use for it."""
    fp32_flops: float | None = None
    """Peak of ordinary (not tensor-core) single precision."""
    tf32_flops: float | None = None
    """Dense peak with TF32 inputs."""
    bf16_flops: float | None = None
    """Dense peak with bfloat16 inputs and fp32 accumulation."""
    fp16_flops: float | None = None
    """Dense peak with half-precision inputs and fp32 accumulation."""
    fp8_flops: float | None = None
    """Dense peak with 8-bit floating-point inputs."""
    fp4_flops: float | None = None
    """Dense peak with 4-bit floating-point inputs."""
    int8_ops: float | None = None
    """Dense peak with 8-bit integer inputs, in operations per second."""
    bf16_measured_flops: float | None = None
    """Best published bfloat16 matrix product."""
    fp8_measured_flops: float | None = None
    """Best published 8-bit floating-point matrix product."""
    memory_bytes: int
    """Device memory a driver reports; where no report is known, the size on the box in GB."""
    memory_marketed_gb: float | None = None
    """The size on the box, in the maker's GB (NVIDIA's are often 2^30 bytes)."""
    memory_bytes_per_s: float
    """Peak bandwidth of the device memory."""
    l2_bytes: int | None = None
    """Last cache level on the device."""
    sms: int | None = None
    """Streaming multiprocessors, compute units or cores."""
    clock_hz: float | None = None
    """Boost clock behind the stated peaks."""
    tdp_w: float | None = None
    """Power limit as sold."""
    pcie_bytes_per_s: float | None = None
    """Link to the host, per direction."""
    nvlink_bytes_per_s: float | None = None
    """All links to other GPUs together (NVLink, xGMI), per direction."""
    sources: tuple[SpecSource, ...] = ()
    """Where the figures were read."""
    notes: str = ""
    """What a user of the figures must know."""

    def __post_init__(self) -> None:
        bounds = FieldChecker()
        bounds.not_empty(name=self.name, title=self.title, vendor=self.vendor, arch=self.arch)
        bounds.one_of("kind", self.kind, get_args(DeviceKind))
        bounds.positive(**{name: getattr(self, name) for name in _FIGURES})
        bounds.count(memory_bytes=self.memory_bytes, l2_bytes=self.l2_bytes, sms=self.sms)
        bounds.mark_unreadable(sources=self.sources)
        if bounds.is_valid("arch") and not self.precisions:
            bounds.add("bf16_flops", "no peak is given in any precision", "give at least one")
        for source in self.sources if bounds.is_valid("sources") else ():
            for field in source.fields:
                if field not in _FIGURES and field not in _COUNTS:
                    bounds.problems.append(
                        build_unknown_name_problem(
                            "figure", field, (*_FIGURES, *_COUNTS), "sources"
                        )
                    )
        bounds.raise_problems()

    @property
    def precisions(self) -> tuple[str, ...]:
        """Every precision that `peak_flops` answers for."""
        return tuple(name for name in _PEAK_FIELD if self._peak(name) is not None)

    def peak_flops(self, precision: str) -> float:
        """Return the dense peak for a precision as a `Layout` names it."""
        if precision not in _PEAK_FIELD:
            raise InputError(
                [build_unknown_name_problem("precision", precision, _PEAK_FIELD, "precision")]
            )
        peak = self._peak(precision)
        if peak is None:
            known = ", ".join(self.precisions)
            raise InputError(
                [
                    Problem(
                        "precision",
                        f"{self.name} ({self.arch}) has no {precision}",
                        f"use one of {known}",
                    )
                ]
            )
        return peak

    def _peak(self, precision: str) -> float | None:
        if precision in _BLOCK_SCALED and not _scales_blocks(self.arch):
            return None
        return getattr(self, _PEAK_FIELD[precision])  # type: ignore[no-any-return]


def _scales_blocks(arch: str) -> bool:
    # NVIDIA from Blackwell on (sm_100) and AMD's CDNA 4 take per-block scales in hardware.
    number = arch.removeprefix("sm_").rstrip("af")
    return arch == "gfx950" or (arch.startswith("sm_") and number.isdigit() and int(number) >= 100)


_COUNTS = ("memory_bytes", "l2_bytes", "sms")
_FIGURES = tuple(
    field
    for field in Gpu.__struct_fields__
    if field.endswith(("_flops", "_ops", "_per_s", "_hz", "_w", "_gb"))
)
NUMERIC_FIELDS = (*_FIGURES, *_COUNTS)
"""The fields of a `Gpu` that hold a figure, each of which a source should cover."""
