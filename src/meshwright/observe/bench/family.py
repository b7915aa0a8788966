"""`Family`: cases of one kind, and how each becomes calls on this machine."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal, NamedTuple

from meshwright.observe.bench.case import Case
from meshwright.observe.bench.timing import Work

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
    weight: float = 1.0
    """Its share of a bench's time, beside those of others."""
