"""`Family`: cases of one kind, and how each becomes calls on this machine."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple

from meshwright.observe.bench.case import Case, Row
from meshwright.observe.bench.timing import HEAT_S, Timed, Work

if TYPE_CHECKING:
    import torch

Size = Literal["quick", "full"]


class Place(NamedTuple):
    """Where cases run."""

    device: "torch.device"
    folder: str = ""
    """Where files may be written, for what measures storage."""
    ranks: int = 1
    """How many processes may take part, for what measures communication."""

    @property
    def on_gpu(self) -> bool:
        """Whether that is a GPU."""
        return self.device.type == "cuda"


Fault = tuple[str, str]
"""The key of a case that broke, and what it said."""
Sweep = Callable[[Sequence[Case], Place, float], Iterator[Row | Fault]]


def no_work(_case: Case, _place: Place) -> Work | None:
    """Stand where a family sweeps its cases itself."""
    return None


class Family(NamedTuple):
    """Cases of one kind."""

    name: str
    title: str
    """What is measured, in a few words."""
    cases: Callable[[Size, bool], tuple[Case, ...]]
    """What to measure, the most telling first: by size of the bench, and whether on a GPU."""
    work: Callable[[Case, Place], Work | None]
    """Make a case ready; None where this machine cannot do it."""
    loaded: bool = False
    """Whether a GPU is kept at its power limit meanwhile, as training does."""
    on_device: bool = True
    """Whether a GPU does the work; storage, launching and data are the host's."""
    heat_s: float = HEAT_S
    """How long, before each case."""
    usual_s: Mapping[Size, float] = MappingProxyType({"quick": 1.0, "full": 1.0})
    """What it takes on a machine with one H200: its share of a bench's time beside others'."""
    sweep: Sweep | None = None
    """Measures cases together until `time.monotonic()` passes an end, in place of `work`: where
    they need files or processes that only all of them are worth."""


def row_of(
    case: Case,
    timed: Timed,
    *,
    flops: float | None = None,
    bytes: float | None = None,  # noqa: A002  # as the row calls it
    items: float | None = None,
    loaded: bool = False,
) -> Row:
    """Return what samples of a case make."""
    return Row(
        case=case,
        seconds=timed.seconds,
        low_s=timed.quantile(0.1),
        high_s=timed.quantile(0.9),
        samples=len(timed.samples),
        flops=flops,
        bytes=bytes,
        items=items,
        loaded=loaded,
        host_s=timed.host_s,
    )
