"""`BenchCase`, what is measured, and `BenchRow`, what came of it: plain values that files hold."""

import msgspec

from meshwright.observe.hardware.telemetry_sampler import Telemetry

SizeValue = int | float | str


class BenchCase(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to measure: an operation at one size."""

    family: str
    """Whose: `gemm`, `attention`, `memory_bound`, `memory_copies`, `storage`, …"""
    name: str
    """Which operation of the family, such as `forward` or `norm_backward`."""
    sizes: dict[str, SizeValue] = {}
    """What it is done with, such as `{"m": 4096, "n": 4096, "k": 4096, "precision": "bf16"}`."""

    @property
    def key(self) -> str:
        """What tells it from every other case."""
        sizes = ",".join(f"{name}={value}" for name, value in sorted(self.sizes.items()))
        return f"{self.family}/{self.name}/{sizes}"

    def size(self, name: str) -> int:
        """Return a size that is a whole number."""
        value = self.sizes[name]
        assert isinstance(value, int), f"{name} of {self.key} is no whole number"
        return value

    def text(self, name: str) -> str:
        """Return a size that is a word."""
        return str(self.sizes[name])


class BenchRow(msgspec.Struct, frozen=True, kw_only=True):
    """What one case took."""

    case: BenchCase
    median_s: float
    """The median of all samples."""
    p10_s: float
    """A tenth of the samples were faster."""
    p90_s: float
    """A tenth were slower."""
    num_samples: int
    """How many."""
    flops: float | None = None
    """Arithmetic of one call, where that is what it is for."""
    bytes: float | None = None
    """What one call cannot do without reading or writing."""
    items: float | None = None
    """What one call does many of: tokens, files, reads."""
    under_load: bool = False
    """Large products ran between samples: the device was as warm as a training step makes it."""
    host_launch_s: float | None = None
    """What launching one call takes from the host."""
    telemetry: Telemetry | None = None

    @property
    def relative_spread(self) -> float:
        """How far the middle eight tenths of the samples lie apart, over their median."""
        return (self.p90_s - self.p10_s) / self.median_s if self.median_s else 0.0

    @property
    def flops_per_s(self) -> float | None:
        """Arithmetic per second."""
        return self.flops / self.median_s if self.flops and self.median_s else None

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes per second."""
        return self.bytes / self.median_s if self.bytes and self.median_s else None

    @property
    def items_per_s(self) -> float | None:
        """Tokens, files or reads per second."""
        return self.items / self.median_s if self.items and self.median_s else None
