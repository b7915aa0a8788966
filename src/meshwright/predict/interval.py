"""How sure a prediction is: the range in which nine of ten published steps lie.

Doubt grows with what is hard to foresee: communication that does not hide, experts whose layers a
host may pace, scans. It reaches further up than down, as what a model leaves out makes steps
longer. The constants are widths found on published runs, not standard errors.
"""

import math

import msgspec

from meshwright.predict.run import Run
from meshwright.spec.model import Experts, GatedDelta, Mamba2


class Doubt(msgspec.Struct, frozen=True, kw_only=True):
    """Widths of the interval, as logarithms of measured over predicted."""

    base: float = 0.13
    """Either way, for any step."""
    exposed: float = 1.0
    """Up, per share of the step spent on communication, that of experts apart, that does not
    hide."""
    experts_down: float = 0.13
    """Down, where layers have experts: newer kernels and CUDA graphs."""
    experts_up: float = 0.45
    """Up, where layers have experts: the host's pace, routing out of balance."""
    scans: float = 0.45
    """Up, where layers have scans, which few published runs time."""


DOUBT = Doubt()


def bounds(run: Run, step_s: float, exposed_s: float, doubt: Doubt = DOUBT) -> tuple[float, float]:
    """Return the seconds between which nine of ten such steps lie.

    `exposed_s` is the part of the step spent on communication that does not hide.
    """
    blocks = run.model.blocks
    experts = any(isinstance(block.mlp, Experts) for block in blocks)
    scans = any(isinstance(block.mixer, Mamba2 | GatedDelta) for block in blocks)
    down = doubt.base + experts * doubt.experts_down
    up = doubt.base + doubt.exposed * exposed_s / step_s
    up += experts * doubt.experts_up + scans * doubt.scans
    return step_s * math.exp(-down), step_s * math.exp(up)
