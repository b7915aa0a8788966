"""`Case`, what is measured, and `Row`, what came of it: plain values that files hold."""

import msgspec

Value = int | float | str


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to measure: an operation at one size."""

    family: str
    """Whose: `products`, `attention`, `elementwise`, `copies`, `storage`, …"""
    name: str
    """Which operation of the family, such as `forward` or `norm_backward`."""
    sizes: dict[str, Value] = {}
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

    def word(self, name: str) -> str:
        """Return a size that is a word."""
        return str(self.sizes[name])


class Telemetry(msgspec.Struct, frozen=True, kw_only=True):
    """What the device said of itself while something was measured."""

    clock_mhz: float | None = None
    """Of the streaming multiprocessors, the median."""
    power_w: float | None = None
    """The median."""
    temperature_c: float | None = None
    """The highest."""
    throttle: tuple[str, ...] = ()
    """Why the clock was held back at any time, such as `power_cap`."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one case took."""

    case: Case
    seconds: float
    """The median of all samples."""
    low_s: float
    """A tenth of the samples were faster."""
    high_s: float
    """A tenth were slower."""
    samples: int
    """How many."""
    flops: float | None = None
    """Arithmetic of one call, where that is what it is for."""
    bytes: float | None = None
    """What one call cannot do without reading or writing."""
    items: float | None = None
    """What one call does many of: tokens, files, reads."""
    loaded: bool = False
    """Large products ran between samples: the device was as warm as a training step makes it."""
    host_s: float | None = None
    """What launching one call takes from the host."""
    telemetry: Telemetry | None = None

    @property
    def spread(self) -> float:
        """How far the middle eight tenths of the samples lie apart, over their median."""
        return (self.high_s - self.low_s) / self.seconds if self.seconds else 0.0

    @property
    def flops_per_s(self) -> float | None:
        """Arithmetic per second."""
        return self.flops / self.seconds if self.flops and self.seconds else None

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes per second."""
        return self.bytes / self.seconds if self.bytes and self.seconds else None

    @property
    def items_per_s(self) -> float | None:
        """Tokens, files or reads per second."""
        return self.items / self.seconds if self.items and self.seconds else None


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where rows were measured, as far as their times depend on it."""

    device: str
    """What the driver calls it, or the processor's name."""
    gpu: str = ""
    """Its name in the catalog; empty for a processor, or one that is not there."""
    host: str = ""
    """The host's processor."""
    cores: int = 0
    torch: str = ""
    cuda: str = ""
    driver: str = ""

    @property
    def fingerprint(self) -> str:
        """What rows of one machine have in common."""
        return "|".join(str(value) for value in msgspec.structs.astuple(self))
