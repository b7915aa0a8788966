"""`Runs`: what an engine asks of whatever carries its orders out."""

from typing import Protocol

from torch import Tensor

from meshwright.run.serve.engine.orders import Orders
from meshwright.run.serve.engine.runner import Computed, Landing
from meshwright.run.serve.model.cache import PagedCache
from meshwright.run.serve.model.forward import Forward
from meshwright.run.serve.model.lora import Adapters
from meshwright.run.serve.sampling.telling import Told


class Runs(Protocol):
    """Carries out orders: the runner of one device, or of several that do the same."""

    forward: Forward
    cache: PagedCache
    """Of the first device."""
    adapters: Adapters | None
    ranks: int
    """Devices that have a part of each layer."""

    @property
    def told(self) -> list[Told]:
        """How likely tokens of prompts were in the last step, part by part that was to tell."""

    def compute(self, orders: Orders) -> Computed | None:
        """Carry out everything but the drawing; None where nobody draws."""

    def draw(self, computed: Computed, mask_LW: Tensor | None = None) -> Landing:
        """Draw a token for each line of what was computed."""
