"""`BenchFamily`: cases of one kind, and how each becomes calls on this machine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from meshwright.observe.bench.bench_case import BenchCase, BenchRow
from meshwright.observe.bench.timing import WARMUP_S, TimedWork, TimingSamples

if TYPE_CHECKING:
    import torch

Size = Literal["quick", "full"]


class BenchTarget(NamedTuple):
    """Where cases run."""

    device: "torch.device"
    folder: str = ""
    """Where files may be written, for what measures storage."""
    max_ranks: int = 1
    """How many processes may take part, for what measures communication."""

    @property
    def on_gpu(self) -> bool:
        """Whether that is a GPU."""
        return self.device.type == "cuda"


FailedCase = tuple[str, str]
"""The key of a case that broke, and what it said."""
CaseRunner = Callable[[Sequence[BenchCase], BenchTarget, float], Iterator[BenchRow | FailedCase]]


def prepare_nothing(_case: BenchCase, _place: BenchTarget) -> TimedWork | None:
    """Stand where a family sweeps its cases itself."""
    return None


class BenchFamily(NamedTuple):
    """Cases of one kind."""

    name: str
    title: str
    """What is measured, in a few words."""
    cases: Callable[[Size, bool], tuple[BenchCase, ...]]
    """What to measure, the most telling first: by size of the bench, and whether on a GPU."""
    prepare: Callable[[BenchCase, BenchTarget], TimedWork | None]
    """Make a case ready; None where this machine cannot do it."""
    under_load: bool = False
    """Whether a GPU is kept at its power limit meanwhile, as training does."""
    runs_on_device: bool = True
    """Whether a GPU does the work; storage, launching and data are the host's."""
    warmup_s: float = WARMUP_S
    """How long, before each case."""
    typical_s: Mapping[Size, float] = MappingProxyType({"quick": 1.0, "full": 1.0})
    """What it takes on a machine with one H200: its share of a bench's time beside others'."""
    run_all: CaseRunner | None = None
    """Measures cases together until `time.monotonic()` passes an end, in place of `prepare`: where
    they need files or processes that only all of them are worth."""


def build_row(
    case: BenchCase,
    timed: TimingSamples,
    *,
    flops: float | None = None,
    bytes: float | None = None,  # noqa: A002  # as the row calls it
    items: float | None = None,
    loaded: bool = False,
) -> BenchRow:
    """Return what samples of a case make."""
    return BenchRow(
        case=case,
        median_s=timed.median_s,
        p10_s=timed.quantile(0.1),
        p90_s=timed.quantile(0.9),
        num_samples=len(timed.samples_s),
        flops=flops,
        bytes=bytes,
        items=items,
        under_load=loaded,
        host_launch_s=timed.host_s,
    )
